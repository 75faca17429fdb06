"""Cached responses, and how they are stored: as flat arrays in a checkpoint, or in a file that
another run can start from.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Version of the file format of `save_responses`; increase it when a field changes its meaning.
FORMAT = 1

# Fields of `CachedResponse` saved as arrays of one value per response, in this order, with dtypes.
FIELDS = {
    "version": np.int64,
    "reward": np.float64,
    "correct": np.bool_,
    "truncated": np.bool_,
    "logprob": np.float64,
    "shortest": np.int32,
}


@dataclasses.dataclass(frozen=True, eq=False)
class CachedResponse:
    """One response to a prompt, as it was sampled.

    Attributes:
      tokens: i32[n], n >= 1, read-only token ids. The last one is the end token unless the response
        is truncated.
      version: version of the policy that began it.
      reward: the trained reward. correct: the verifier's verdict. truncated: it ended by its token
        limit.
      logprob: summed log-prob of its sampled tokens under the policy that sampled them (prefix
        tokens count 0).
      shortest: tokens of the shortest response in its group.
    """

    tokens: np.ndarray
    version: int
    reward: float
    correct: bool
    truncated: bool
    logprob: float
    shortest: int

    def __post_init__(self):
        tokens = np.array(self.tokens, np.int32)  # a copy: a view would keep its whole group alive
        tokens.setflags(write=False)
        object.__setattr__(self, "tokens", tokens)


def pack_responses(held: Mapping[str, CachedResponse]) -> dict[str, Any]:
    """Packs responses by prompt id, in order, as flat arrays (none empty) and one JSON string."""
    if not held:
        return {}
    rows = list(held.values())
    return {
        "ids": json.dumps(list(held)),
        "lengths": np.array([len(r.tokens) for r in rows], np.int32),
        "tokens": np.concatenate([r.tokens for r in rows]),
        **{
            name: np.array([getattr(r, name) for r in rows], dtype)
            for name, dtype in FIELDS.items()
        },
    }


def unpack_responses(packed: Mapping[str, Any]) -> dict[str, CachedResponse]:
    """Inverse of `pack_responses`.

    Raises ValueError naming a field that is missing or does not fit the others.
    """
    if not packed:
        return {}
    if missing := [name for name in ("ids", "lengths", "tokens", *FIELDS) if name not in packed]:
        raise ValueError(f"field {missing[0]!r} is missing")
    ids = _json("ids", packed["ids"])
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise ValueError("field 'ids' must be a JSON list of strings")
    if len(set(ids)) != len(ids):
        raise ValueError("field 'ids' names a prompt twice")
    columns = {
        name: _column(name, packed[name], dtype, None if name == "tokens" else len(ids))
        for name, dtype in {"lengths": np.int32, "tokens": np.int32, **FIELDS}.items()
    }
    lengths = columns.pop("lengths")
    tokens = columns.pop("tokens")
    if lengths.min(initial=1) < 1 or int(lengths.sum(dtype=np.int64)) != len(tokens):
        raise ValueError(
            f"field 'lengths' must be 1 or more each and add up to the {len(tokens)} tokens"
        )
    for name, values, least in (("tokens", tokens, 0), ("shortest", columns["shortest"], 1)):
        if (smallest := values.min(initial=least)) < least:
            raise ValueError(f"field {name!r} holds {smallest}; it must be {least} or more")
    parts = np.split(tokens, np.cumsum(lengths, dtype=np.int64)[:-1])
    rows = zip(*(column.tolist() for column in columns.values()))
    return {name: CachedResponse(part, *row) for name, part, row in zip(ids, parts, rows)}


def _json(name: str, value: Any) -> Any:
    """Parses a field that holds JSON. Raises ValueError naming the field."""
    try:
        return json.loads(str(value))
    except json.JSONDecodeError as error:
        raise ValueError(f"field {name!r} is not JSON ({error})") from None


def _column(name: str, value: Any, dtype: type, length: int | None) -> np.ndarray:
    """Returns a field's values as `dtype`, without rounding or wrapping.

    Raises ValueError naming the field.
    """
    value = np.asarray(value)
    if value.ndim != 1 or (length is not None and len(value) != length):
        expected = "one axis" if length is None else f"[{length}], one value for each prompt id"
        raise ValueError(f"field {name!r} has shape {list(value.shape)}; it must have {expected}")
    if not np.can_cast(value.dtype, dtype, "same_kind"):
        raise ValueError(f"field {name!r} has type {value.dtype}; it must be {np.dtype(dtype)}")
    cast = value.astype(dtype)
    if not np.array_equal(cast, value, equal_nan=True):
        raise ValueError(f"field {name!r} holds a value that {np.dtype(dtype)} cannot hold")
    return cast


def save_responses(
    path: str | Path, held: Mapping[str, CachedResponse], about: Mapping[str, Any]
) -> None:
    """Writes responses by prompt id to one .npz file, atomically.

    `about`: JSON values that describe the file, such as the policy that sampled the responses.

    Raises OSError if the file cannot be written; an existing file then stays.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            # NumPy stores a string as an array without an axis: nothing is pickled.
            np.savez(
                file,
                format=np.int32(FORMAT),
                about=np.str_(json.dumps(dict(about))),
                **pack_responses(held),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def load_responses(
    path: str | Path, vocab_size: int | None = None
) -> tuple[dict[str, CachedResponse], dict[str, Any]]:
    """Reads a file written by `save_responses`. Returns (responses by prompt id, `about`).

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is damaged or has another format, a field is missing or does not fit, or
        a token id is negative or not below `vocab_size`. Names the file and the fault.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            fields = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: there is no such file of cached responses; experiments/replay_cache.py "
            "writes one"
        ) from None
    # np.load raises many errors for damaged files: of zipfile, zlib and its own.
    except Exception as error:
        raise ValueError(
            f"{path}: not a file of cached responses, or a damaged one ({error}); write it anew "
            "with experiments/replay_cache.py"
        ) from None
    try:
        for name in ("format", "about"):
            if name not in fields:
                raise ValueError(f"field {name!r} is missing")
        if str(version := fields.pop("format")) != str(FORMAT):
            raise ValueError(
                f"field 'format' is {version}, and this version of the code reads {FORMAT}; write "
                "the file anew"
            )
        if not isinstance(about := _json("about", fields.pop("about")), dict):
            raise ValueError("field 'about' must be a JSON object")
        held = unpack_responses(fields)
        for name, response in held.items():
            if vocab_size is not None and (worst := int(response.tokens.max())) >= vocab_size:
                raise ValueError(
                    f"the response to prompt {name!r} has token id {worst}, but the vocabulary has "
                    f"only {vocab_size} ids. The file was made with another tokenizer: use one "
                    "made with the tokenizer of this policy"
                )
        return held, about
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
