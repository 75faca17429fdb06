"""Paths in settings and flags. All are on this machine's file systems, except `checkpoints.dir`,
which may be in a Google Cloud Storage bucket.
"""

import re
from collections.abc import Iterator, Sequence

CHECKPOINTS = "checkpoints.dir"
# Fields that hold text for a policy, not paths.
_TEXTS = ("prompt", "system", "instruction", "think_open", "think_close", "ask")
# A path may begin at the start, after NAME=, and after a comma. One letter before a colon is a
# Windows drive.
_URL = re.compile(r"(?:^|[,=])\s*([A-Za-z][A-Za-z0-9+.-]+):/")
_HOME = re.compile(r"(?:^|[,=])\s*~")
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+/+[^/\s]\S*")


def check_path(name: str, value: str) -> None:
    """Raises ValueError if a value of a setting or a flag is or contains a URL, or a path that
    begins with ~: it would create a folder of that name.

    Args:
      name: as the user writes it: "config.data.train", "--workdir".
    """
    if name.lstrip("-").rpartition(".")[2] in _TEXTS:
        return
    if name.endswith(CHECKPOINTS) and value.startswith("gs:"):
        if not _BUCKET.fullmatch(value):
            raise ValueError(f"{name} must read gs://BUCKET/FOLDER; got {value!r}")
        return
    if found := _URL.search(value):
        scheme = found[1]
        advice = (
            f"write the path without {scheme}://"
            if scheme.lower() == "file"
            else "copy it to this machine, or mount the store as a folder"
        )
        raise ValueError(
            f"{name}={value!r}: {scheme}:// is no folder of this machine, where all files are read "
            f"and written: {advice}. Checkpoints alone may lie in a bucket: "
            f"config.{CHECKPOINTS}=gs://BUCKET/FOLDER"
        )
    if _HOME.search(value):
        raise ValueError(
            f"{name}={value!r}: the shell did not replace ~ there; write $HOME in its place"
        )


def check_paths(values: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Error messages for each (name, value) that `check_path` refuses."""
    for name, value in values:
        try:
            check_path(name, value)
        except ValueError as error:
            yield str(error)
