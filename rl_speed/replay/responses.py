"""Cached responses: one sample's data, as flat arrays for a checkpoint, and as a file for another
run.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# File format of `save_responses`; raise it when a field changes its meaning.
FORMAT = 1

# Arrays of one value per response, in the order they are saved: field of `CachedResponse`, dtype.
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
      tokens: i32[n], n >= 1, read-only: token ids, never text (decoding and encoding again may give
        other ids). The last one is the end token unless the response is truncated.
      version: policy updates made when it was sampled.
      reward: as trained on. correct: by the verifier. truncated: ended by its token limit.
      logprob: sum over the sampled tokens, by the policy that sampled them (prefix tokens count 0).
      shortest: tokens of the shortest response of its group.
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
    """Responses by prompt id, in order, as flat arrays (none empty) and one JSON string."""
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
    """Value of a field that holds JSON. Raises ValueError naming the field."""
    try:
        return json.loads(str(value))
    except json.JSONDecodeError as error:
        raise ValueError(f"field {name!r} is not JSON ({error})") from None


def _column(name: str, value: Any, dtype: type, length: int | None) -> np.ndarray:
    """A field's values as `dtype`, without rounding or wrapping.

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
    """Writes one .npz atomically.

    `about`: anything JSON, such as who sampled them and at what cost.

    Raises OSError if it cannot be written; an existing file then stays.
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
    """(responses by prompt id, `about`) of a file that `save_responses` wrote.

    Raises:
      FileNotFoundError: there is none.
      ValueError: names the file and its fault: damaged, another format, a field that is missing or
        does not fit, or a token id that is negative or not below `vocab_size`.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            fields = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file of cached responses") from None
    # np.load raises many errors for damaged files: of zipfile, zlib and its own.
    except Exception as error:
        raise ValueError(f"{path}: not a whole file of cached responses ({error})") from None
    try:
        for name in ("format", "about"):
            if name not in fields:
                raise ValueError(f"field {name!r} is missing")
        if str(version := fields.pop("format")) != str(FORMAT):
            raise ValueError(f"its field 'format' is {version}; this code reads {FORMAT}")
        if not isinstance(about := _json("about", fields.pop("about")), dict):
            raise ValueError("field 'about' must be a JSON object")
        held = unpack_responses(fields)
        for name, response in held.items():
            if vocab_size is not None and (worst := int(response.tokens.max())) >= vocab_size:
                raise ValueError(
                    f"the response to prompt {name!r} has token id {worst}; the vocabulary has "
                    f"{vocab_size} ids. It was made with another tokenizer"
                )
        return held, about
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
