"""Paths in settings and flags. All are on this machine's file systems, except `checkpoints.dir`,
which may be in a Google Cloud Storage bucket.
"""

import re
from collections.abc import Iterator, Sequence

CHECKPOINTS = "checkpoints.dir"
# Fields that hold no path: text for a policy, and functions (module:function).
_TEXTS = ("prompt", "system", "instruction", "think_open", "think_close", "ask")
_FUNCTIONS = ("verifier", "extra", "advantage", "loss", "name")
# Where a path may begin: at the start, behind NAME=, and behind a comma. One letter before a colon
# is a drive of Windows.
_BEGIN = r"(?:^|[,=])\s*"
_URL = re.compile(_BEGIN + r"([A-Za-z][A-Za-z0-9+.-]+):/")
# Schemes of stores, which are also told without a slash. NAME:SAMPLES= is a set of questions.
_STORE = re.compile(
    _BEGIN + r"(gs|gcs|s3[an]?|(?:web)?hdfs|viewfs|abfss?|wasbs?|az|adl|oss|cos|dbfs|file|https?"
    r"|s?ftp):(?!\d+\s*=)",
    re.IGNORECASE,
)
_HOME = re.compile(_BEGIN + "~")
_VARIABLE = re.compile(r"(?:^|[,=/])\s*(\$(?:\w+|[{(][^/]*))")
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+/+[^/\s]\S*")


def check_path(name: str, value: str) -> None:
    """Raises ValueError where the value of a setting or a flag is, or has among others, a URL, a
    path that begins with ~, or a variable of the shell; or where it begins or ends with a blank.
    Any of them would become a folder of that name.

    Args:
      name: as the user writes it: "config.data.train", "--workdir".
    """
    if name.lstrip("-").rpartition(".")[2] in (*_TEXTS, *_FUNCTIONS):
        return
    if value != value.strip():
        raise ValueError(
            f"{name}={value!r} "
            + ("begins or ends with a blank: leave it out" if value.strip() else "is blank")
        )
    if name.endswith(CHECKPOINTS) and value.startswith("gs:"):
        if not _BUCKET.fullmatch(value):
            raise ValueError(f"{name} must read gs://BUCKET/FOLDER; got {value!r}")
        return
    if found := _URL.search(value) or _STORE.search(value):
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
    if found := _VARIABLE.search(value):
        raise ValueError(
            f"{name}={value!r}: the shell did not replace {found[1]} there (it does not inside of "
            "single quotes, and nothing does in a file); write the path itself"
        )


def check_paths(values: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Error messages for each (name, value) that `check_path` refuses."""
    for name, value in values:
        try:
            check_path(name, value)
        except ValueError as error:
            yield str(error)
