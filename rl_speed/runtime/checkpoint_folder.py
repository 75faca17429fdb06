"""The checkpoint folder of a run: its location, its steps, and the run that owns it."""

import importlib.util
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

from rl_speed.config import flatten
from rl_speed.runtime.hosts import Hosts

REMOTE = "gs://"
# Prefix of a checkpoint's name while a new one of the same step is written to replace it.
REPLACED = "replaced_"
# File in a checkpoint folder that names the run which writes there, and its settings.
_OWNER = "run.json"
# Prefixes of settings that may change when a run continues without its old workdir.
_FREE = ("checkpoints.", "logging.", "mesh.", "generation_mesh.", "training.steps")


def checkpoint_folder(workdir: str | Path, directory: str = "") -> epath.Path:
    """Absolute checkpoint folder of a run.

    Args:
      directory: a local folder, or gs://BUCKET/FOLDER; "": checkpoints/ in the workdir.

    Raises ValueError if packages for a bucket are missing, or if the folder is the workdir itself
    or inside the policy folder, which an export replaces.
    """
    if directory.startswith(REMOTE):
        lacking = [p for p in ("gcsfs", "google.cloud.storage") if not _installed(p)]
        if lacking:
            raise ValueError(
                f"config.checkpoints.dir={directory!r} needs packages that are not installed: pip "
                "install 'rl_speed[gcs]', or gcsfs and google-cloud-storage"
            )
        import fsspec

        # A cached listing would hide what another process wrote since.
        for protocol in ("gcs", "gs"):
            fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
        return epath.Path(directory.rstrip("/"))
    home = Path(workdir).resolve()
    folder = Path(directory).resolve() if directory else home / "checkpoints"
    if folder == home:
        raise ValueError(
            f"config.checkpoints.dir={directory!r} is the workdir itself: give a folder inside it"
        )
    if home / "policy" in (folder, *folder.parents):
        raise ValueError(
            f"config.checkpoints.dir={directory!r} is in {home / 'policy'}, which an export "
            "replaces: give another folder"
        )
    return epath.Path(folder)


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def saved_steps(directory: str | os.PathLike) -> list[int]:
    """Steps of the finished checkpoints in a folder, sorted; empty if there is no folder.

    It only reads, so it is safe while the run writes. A checkpoint that is being replaced counts:
    `step_path`.
    """
    folder = epath.Path(directory)
    found = set()
    for path in folder.iterdir() if folder.exists() else ():
        name = path.name.removeprefix(REPLACED)
        if name.isdigit() and (path / "state").is_dir() and ocp.utils.is_checkpoint_finalized(path):
            found.add(int(name))
    return sorted(found)


def step_path(folder: epath.Path, step: int) -> epath.Path:
    """Path of one of `saved_steps`."""
    path = folder / str(step)
    return path if path.exists() else folder / f"{REPLACED}{step}"


def require_moved(workdir: Path, before: str, folder: epath.Path) -> None:
    """Check that a run with a new checkpoint folder does not lose its old checkpoints.

    Args:
      before: `checkpoints.dir` in config.json. folder: the new folder.

    Raises FileNotFoundError: the old folder has checkpoints and the new one has none.
    """
    there = checkpoint_folder(workdir, before)
    if there != folder and not saved_steps(folder) and (found := saved_steps(there)):
        raise FileNotFoundError(
            f"{workdir} holds a run whose checkpoints are in {there} (step {found[-1]}), and "
            f"{folder} holds none: move them there, or set config.checkpoints.dir={before!r}; to "
            "start a new run, choose another --workdir"
        )


class TakenError(RuntimeError):
    """Another run writes into the folder of checkpoints."""

    exit_status = 2


class Owner:
    """A run's claim on a checkpoint folder, recorded in run.json there.

    Args:
      folder: the checkpoint folder. workdir, settings, hosts: those of this run.
    """

    def __init__(
        self, folder: epath.Path, workdir: Path, settings: Mapping[str, Any], hosts: Hosts
    ):
        self._folder = folder
        self._workdir = workdir.resolve()
        self._settings = settings
        self._hosts = hosts
        self._mark = ""

    def check(self, goes_on: bool) -> None:
        """Check, before anything is built, that this run may write into the folder.

        Args:
          goes_on: whether the checkpoints in the folder are known to be this run's. If not,
            checkpoints with the same settings count as its own (the workdir was lost).

        Raises ValueError: the checkpoints have other settings, or the folder is not writable.
        """
        problem = ""
        if self._hosts.writes:
            try:
                probe = self._folder / ".writable"
                self._folder.mkdir(parents=True, exist_ok=True)
                probe.write_text("")
                probe.unlink()
                owner = {} if goes_on or not saved_steps(self._folder) else self.read()
                if other := _difference(owner, self._settings):
                    problem = (
                        f"{self._folder} holds the checkpoints of another run, of the workdir "
                        f"{owner['workdir']}, with {other}. Give this run another "
                        "config.checkpoints.dir; or set config.checkpoints.resume=must to continue "
                        "from those checkpoints"
                    )
            except Exception as error:  # noqa: BLE001 (a storage client raises any type)
                text = getattr(error, "strerror", None) or str(error).strip() or repr(error)
                problem = (
                    f"cannot write checkpoints to {self._folder} ({text.splitlines()[0]}); choose "
                    "a folder or a bucket that you may write to"
                )
        if problem := self._hosts.first(problem, "the folder of checkpoints"):
            raise ValueError(problem)

    def claim(self) -> None:
        """Claim the folder for this run. The next save of a previous owner raises TakenError."""
        if not self._hosts.writes:
            return
        self._mark = secrets.token_hex(8)
        made = {
            "mark": self._mark,
            "workdir": str(self._workdir),
            "opened": f"{time.strftime('%Y-%m-%d %H:%M:%S')} by {self._hosts.name(0)}",
            "settings": self._settings,
        }
        (self._folder / _OWNER).write_text(json.dumps(made, indent=2) + "\n")

    def read(self) -> dict[str, Any]:
        """Record that the latest `claim` wrote; empty if there is none or it is not readable."""
        try:
            found = json.loads((self._folder / _OWNER).read_text())
        except Exception:  # noqa: BLE001 (another version's file, half written, or unreachable)
            return {}
        return found if isinstance(found, dict) and "workdir" in found else {}

    def require(self) -> None:
        """Raises TakenError if another run has claimed the folder after this one."""
        owner = self.read() if self._mark else {}
        other = "" if owner.get("mark", self._mark) == self._mark else json.dumps(owner)
        if other := self._hosts.first(other, "whose checkpoints these are"):
            owner = json.loads(other)
            raise TakenError(
                f"another run writes its checkpoints into {self._folder} since "
                f"{owner.get('opened')} (workdir {owner['workdir']}), so this run no longer saves "
                "there. End one of the two, or give one of them another --workdir or "
                "config.checkpoints.dir"
            )


def _difference(owner: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The first setting in which the owner differs from this run; "" if there is none, or the
    owner's settings are unknown.
    """
    before = flatten(owner.get("settings", {}))
    now = flatten(settings)
    return next(
        (
            f"config.{name} = {before[name]!r}, not {now[name]!r}"
            for name in before.keys() & now.keys()
            if not name.startswith(_FREE) and before[name] != now[name]
        ),
        "",
    )
