"""Held-out sets: several, each with a name, its questions and its own number of samples."""

import dataclasses
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rl_speed.data.prompts import Prompt

# The word, in place of a file, for the questions that config.data.hold_out takes out of training.
HELD_OUT_OF_TRAIN = "hold_out"
# The word of config.data.decontaminate for all files of config.data.eval.
EVALUATION_FILES = "eval"
_NAME = re.compile(r"[^/:,=]+")


class HeldOutSet(NamedTuple):
    """Questions that never train, and how many responses each of them gets."""

    prompts: Sequence[Prompt]
    samples: int


class NamedFile(NamedTuple):
    """Where a held-out set is read.

    Attributes:
      name: "" for the only one, where nobody named it. file: anything that `sources.read_items`
        takes, or HELD_OUT_OF_TRAIN. samples: to a question; 0 says nothing of them.
    """

    name: str
    file: str
    samples: int = 0


def file_name(source: str) -> str:
    """What a set is called where nobody named it: as its file or folder, without what follows the
    first dot, or as the files of a pattern, without it; as a data set of the hub, without owner,
    configuration and split.
    """
    plain = re.sub(r"\[.*?\]|[*?]", "", Path(source).name.partition(":")[0].partition("@")[0])
    return plain.split(".")[0].strip("-_") or Path(source).parent.name


def parse_files(text: str, field: str) -> list[NamedFile]:
    """The sets of "FILE", or of several with commas between them, each "[NAME[:SAMPLES]=]FILE".

    A comma begins the next set: a set of several files is a folder or a pattern
    ("NAME=FOLDER@test,test-*.parquet"). The samples stand beside the name, since the name of a data
    set of the hub may have a ":" of its own. What exists as a path is a path, whatever is in it. A
    set without a name has that of `file_name`, unless it is the only one: then it has none.

    Args:
      field: what errors call the text.

    Raises ValueError: an entry that does not read so, or two sets of one name.
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
    """The first `limit` prompts (0: all) of the set `name`, with the visits that key the randomness
    of their responses: by the name and the place in the set, so that neither other sets nor a limit
    change a question's responses. A set without a name counts from 0.
    """
    start = zlib.crc32(name.encode())
    return tuple(
        dataclasses.replace(p, visit=(start + i) % 2**31)
        for i, p in enumerate(prompts[: limit or None])
    )
