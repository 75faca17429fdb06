"""Checks paths in settings and flags. A path must be on this machine's file systems; only
`checkpoints.dir` may be in a Google Cloud Storage bucket.
"""

import re
from collections.abc import Iterator, Sequence

CHECKPOINTS = "checkpoints.dir"
# Fields that hold something else than a path: text for a policy, functions (module:function).
_TEXTS = ("prompt", "system", "instruction", "think_open", "think_close", "ask")
_FUNCTIONS = ("verifier", "extra", "advantage", "loss", "name")
# A path may begin at the start, after NAME=, and after a comma. One letter before a colon is a
# Windows drive, not a scheme.
_BEGIN = r"(?:^|[,=])\s*"
_URL = re.compile(_BEGIN + r"([A-Za-z][A-Za-z0-9+.-]+):/")
# Schemes of remote stores, recognised also without "/" after the colon. NAME:SAMPLES= is not one:
# it names an evaluation set.
_STORE = re.compile(
    _BEGIN + r"(gs|gcs|s3[an]?|(?:web)?hdfs|viewfs|abfss?|wasbs?|az|adl|oss|cos|dbfs|file|https?"
    r"|s?ftp):(?!\d+\s*=)",
    re.IGNORECASE,
)
_HOME = re.compile(_BEGIN + "~")
_VARIABLE = re.compile(r"(?:^|[,=/])\s*(\$(?:\w+|[{(][^/]*))")
_BUCKET = re.compile(r"gs://[a-z0-9][a-z0-9._-]+/+[^/\s]\S*")


def check_path(name: str, value: str) -> None:
    """Raises ValueError if the value of a setting or a flag contains a URL, a path that begins with
    ~, or a shell variable, or if it begins or ends with white space. Each would otherwise become a
    folder of that name.

    Args:
      name: as the user writes it: "config.data.train", "--workdir".
    """
    if name.lstrip("-").rpartition(".")[2] in (*_TEXTS, *_FUNCTIONS):
        return
    if value != value.strip():
        raise ValueError(
            f"{name}={value!r} "
            + (
                "begins or ends with a blank: remove it"
                if value.strip()
                else "holds only blanks: give a path, or leave it empty"
            )
        )
    if name.endswith(CHECKPOINTS) and value.startswith("gs:"):
        if not _BUCKET.fullmatch(value):
            raise ValueError(f"{name} must have the form gs://BUCKET/FOLDER; got {value!r}")
        return
    if found := _URL.search(value) or _STORE.search(value):
        scheme = found[1]
        advice = (
            f"write the path without {scheme}://"
            if scheme.lower() == "file"
            else "copy it to this machine, or mount the store as a folder"
        )
        raise ValueError(
            f"{name}={value!r}: {scheme}:// is no folder of this machine, and files are read and "
            f"written only on this machine: {advice}. Only checkpoints can be in a bucket: "
            f"config.{CHECKPOINTS}=gs://BUCKET/FOLDER"
        )
    if _HOME.search(value):
        raise ValueError(
            f"{name}={value!r}: the shell did not replace ~, which it does only at the start of a "
            "word; write $HOME instead"
        )
    if found := _VARIABLE.search(value):
        raise ValueError(
            f"{name}={value!r}: the shell did not replace {found[1]}, as in single quotes or in a "
            "file; write the path itself"
        )


def check_paths(values: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yields the error message for each (name, value) that `check_path` refuses."""
    for name, value in values:
        try:
            check_path(name, value)
        except ValueError as error:
            yield str(error)
