"""Models by their name on the Hugging Face hub: OWNER/NAME, or OWNER/NAME@REVISION."""

import functools
import logging
import pathlib
import re

log = logging.getLogger(__name__)

_NAME = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?")
DESCRIPTION = ("*.json", "*.jinja", "*.model", "merges.txt", "tokenizer*")
WEIGHTS = ("*.safetensors",)
# Subfolders hold the same weights in other formats; "consolidated" files are Mistral's own format.
IGNORED = ("*/*", "consolidated*")


def is_hub_name(name: str) -> bool:
    """Returns whether `name` looks like a model's name on the hub and is not an existing path."""
    return (
        not pathlib.Path(name).exists()
        and not name.endswith(".json")
        and _NAME.fullmatch(name) is not None
    )


def split_revision(name: str) -> tuple[str, str | None]:
    """Returns (OWNER/NAME, its revision or None) of a hub name; (name, None) of a path."""
    found = _NAME.fullmatch(name) if is_hub_name(name) else None
    return (found["repo"], found["revision"]) if found else (name, None)


def model_directory(name: str, weights: bool = True, field: str = "config.model.path") -> str:
    """Returns a model's local directory: `name` itself, or its snapshot, downloaded from the hub.

    Args:
      name: a path, or OWNER/NAME[@REVISION]. An existing path is always read as a path.
      weights: whether to download the weights; otherwise only JSON files and the tokenizer.
      field: the setting that holds the name, for errors.

    Raises:
      FileNotFoundError: there is no such path, and the hub has no such model, refuses access or
        cannot be reached; the message says which, and what to do.
    """
    return _snapshot(name, weights, field) if is_hub_name(name) else name


@functools.lru_cache(maxsize=16)
def _snapshot(name: str, weights: bool, field: str) -> str:
    import huggingface_hub

    found = _NAME.fullmatch(name)
    try:
        directory = huggingface_hub.snapshot_download(
            found["repo"],
            revision=found["revision"],
            allow_patterns=[*DESCRIPTION, *(WEIGHTS if weights else ())],
            ignore_patterns=list(IGNORED),
        )
    # The library also raises errors of its HTTP client.
    except Exception as error:
        raise FileNotFoundError(
            f"{field}: {name}: no such directory, and not read from the Hugging Face hub: "
            f"{_reason(error, found['repo'])}"
        ) from None
    if weights and not any(pathlib.Path(directory).glob("*.safetensors")):
        raise FileNotFoundError(
            f"{field}: {name}: {directory}, its snapshot from the Hugging Face hub, holds no "
            ".safetensors file. If the machine is offline, download the weights first (hf download "
            + found["repo"]
            + "); if the model has another format, convert it to safetensors"
        )
    log.info("%s: the snapshot %s", name, directory)
    return directory


def _reason(error: Exception, repo: str) -> str:
    """Returns the cause of a hub error and its remedy, in one line."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return (
            f"access must be granted to your account; ask at https://huggingface.co/{repo}, and "
            "log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "it has no such revision; leave out @REVISION, or name a branch, tag or commit"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "there is no such model, or it is private; check the name, or log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return (
        f"{first} ({type(error).__name__}). Without a network, give a local directory, made with "
        f"`hf download {repo} --local-dir DIRECTORY` on a machine that has one"
    )
