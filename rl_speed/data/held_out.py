"""Held-out sets, each with a name, its questions and its own number of samples."""

import dataclasses
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rl_speed.data.prompts import Prompt

# Word that replaces a file: the questions that config.data.hold_out takes out of training.
HELD_OUT_OF_TRAIN = "hold_out"
# Word in config.data.decontaminate for all files of config.data.eval.
EVALUATION_FILES = "eval"
_NAME = re.compile(r"[^/:,=]+")


class HeldOutSet(NamedTuple):
    """Questions that are never trained on, and the number of samples for each."""

    prompts: Sequence[Prompt]
    samples: int


class NamedFile(NamedTuple):
    """The file of a held-out set.

    Attributes:
      name: "" for a single unnamed set. file: anything that `sources.read_items` takes, or
        HELD_OUT_OF_TRAIN. samples: per question; 0: not given.
    """

    name: str
    file: str
    samples: int = 0


def file_name(source: str) -> str:
    """Default name of a set: its file or folder without everything after the first dot, a file
    pattern without wildcards, or a hub data set without owner, configuration and split.
    """
    plain = re.sub(r"\[.*?\]|[*?]", "", Path(source).name.partition(":")[0].partition("@")[0])
    return plain.split(".")[0].strip("-_") or Path(source).parent.name


def parse_files(text: str, field: str) -> list[NamedFile]:
    """The sets of "FILE", or of several separated by commas, each "[NAME[:SAMPLES]=]FILE".

    A comma always begins the next set, so a set of several files is a folder or a pattern. An
    existing path is always a path. An unnamed set gets its `file_name`; a single one gets no name.
    `field` names the text in errors.

    Raises ValueError: an entry in another form, or two sets of one name.
    """
    whole = text.strip()
    entries = [whole] if Path(whole).exists() else [e.strip() for e in whole.split(",")]
    found: dict[str, NamedFile] = {}
    for entry in filter(None, entries):
        one = _parse_file(entry, field)
        if not one.name and len([e for e in entries if e]) > 1:
            one = one._replace(name=file_name(one.file))
        if one.name in found:
            raise ValueError(
                f"{field} names two sets {one.name!r} ({found[one.name].file} and {one.file}): "
                "call one of them NAME=FILE; a set of several files is a folder or a pattern"
            )
        found[one.name] = one
    return list(found.values())


def _parse_file(entry: str, field: str) -> NamedFile:
    left, equals, file = (part.strip() for part in entry.partition("="))
    if not equals or "/" in left or Path(entry).exists():
        return NamedFile("", entry)
    name, colon, samples = left.partition(":")
    if not file or not _NAME.fullmatch(name):
        raise ValueError(
            f"{field} is FILE or NAME=FILE, or NAME:SAMPLES=FILE, with no '/' and ':' in the name; "
            f"got {entry!r}"
        )
    if colon and not (samples.isdecimal() and int(samples) > 0):
        raise ValueError(
            f"{field}: in NAME:SAMPLES=FILE the samples are a whole number of at least 1; got "
            f"{entry!r}"
        )
    return NamedFile(name, file, int(samples or 0))


def numbered(name: str, prompts: Sequence[Prompt], limit: int = 0) -> tuple[Prompt, ...]:
    """The first `limit` prompts (0: all) of the set `name`, with visits from the name and the index
    in the set, so other sets or a limit do not change a question's samples.
    """
    start = zlib.crc32(name.encode())
    return tuple(
        dataclasses.replace(p, visit=(start + i) % 2**31)
        for i, p in enumerate(prompts[: limit or None])
    )
