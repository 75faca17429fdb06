"""Supervised examples: from files to token ids, held out by question, packed into rows.

The data of an update are a function of (examples, seed, step): there is no state to save, and a
resumed run sees what it would have seen.
"""

import bisect
import dataclasses
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import struct

from rl_speed.data import load_rows
from rl_speed.data.loaders import DataError, Fields, Row
from rl_speed.data.select import duplicate_key
from rl_speed.policy import prompt_encoder

Array = jax.Array
log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A prompt (i32[P]) with the response to learn (i32[R], end token included);
    its question and answer as text.
    """

    prompt: np.ndarray
    response: np.ndarray
    id: str = ""
    question: str = ""
    answer: str = ""

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@struct.dataclass
class SFTBatch:
    """What an update, or a part of an evaluation, reads.

    Attributes:
      tokens: i32[B, T], right-padded.
      mask: bool[B, T], True on the tokens to learn.
      segments: i32[B, T], None where a row is one example; else examples of a row are numbered from
        1, padding is 0.
    """

    tokens: Array
    mask: Array
    segments: Array | None = None


# Files.


def read_examples(
    path: str | Path,
    tokenizer: Any,
    template: str,
    ends: Sequence[int],
    on_bad_row: str = "error",
    fields: Fields = Fields(),
) -> tuple[list[Example], int]:
    """The rows of a file as `rl_speed.data.load_rows` understands them, each with its solution;
    how many were skipped.

    Args:
      template: of `prompt_encoder`. ends: ids that end a response; the first is put behind a
        solution that has none of them there.
      on_bad_row: "error", or "skip" to count rows that are bad or have no solution. fields: as of
        `load_rows`.

    Raises:
      DataError: as `load_rows`; a row without a solution (file and line are named), or no row
        that has one.
      ValueError: the template, or a prompt without tokens.
    """
    rows, report = load_rows(path, on_bad_row, fields, answers=False)
    log.info("%s: %s", path, report.fields_text())
    lacking = [row for row in rows if not row.solution]
    if lacking and on_bad_row == "error":
        raise DataError(
            f'{Path(path).parent / lacking[0].where}: no "solution", and "answer" is '
            f'none as in GSM8K (text that ends in "#### 42"); so are {len(lacking)} of '
            f"{len(rows)} rows (config.data.on_bad_row=skip would count them)"
        )
    if len(lacking) == len(rows):
        raise DataError(f"{path}: none of {len(rows)} rows has a solution to learn from")
    encode = prompt_encoder(tokenizer, template)
    return [
        encode_example(row, tokenizer, encode, ends) for row in rows if row.solution
    ], report.bad + len(lacking)


def encode_example(
    row: Row, tokenizer: Any, encode: Callable[[str], list[int]], ends: Sequence[int]
) -> Example:
    """A row as token ids: the prompt as the sampler will see it,
    the solution closed by one end token.

    A solution that was sampled may bring its end token as text (perhaps several): one of
    them stays.
    """
    prompt = np.asarray(encode(row.question), np.int32)
    if not len(prompt):
        raise ValueError(
            f"row {row.id!r}: its prompt has no token, so that nothing predicts "
            "the first of the solution"
        )
    solution = [int(token) for token in tokenizer.encode(row.solution, add_special_tokens=False)]
    end = ends[0]
    while solution and solution[-1] in ends:
        end = solution.pop()
    return Example(prompt, np.asarray([*solution, end], np.int32), row.id, row.question, row.answer)


def keep_short(examples: Sequence[Example], max_length: int) -> tuple[list[Example], int]:
    """Examples of at most `max_length` tokens, and how many were dropped:
    cutting one would hide its end.

    Raises ValueError when none is left.
    """
    kept = [example for example in examples if len(example) <= max_length]
    if not kept:
        shortest = min(map(len, examples), default=0)
        raise ValueError(
            f"all {len(examples)} examples are longer than config.examples.max_length "
            f"= {max_length} tokens; the shortest has {shortest}"
        )
    return kept, len(examples) - len(kept)


def hold_out(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """(to train on, held out): by a hash of the question (case and white space aside), so that
    neither order nor other rows matter, and all solutions of a question are on one side. At least
    one question is held out where `share` is above 0 and there are two.
    """
    keys = [duplicate_key(e.question) for e in examples]
    place = {
        key: int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
        for key in keys
    }
    count = sum(at < share for at in place.values())
    if share > 0 and len(place) > 1:
        count = min(max(count, 1), len(place) - 1)
    held = set(sorted(place, key=place.get)[:count])
    side = lambda out: [e for e, key in zip(examples, keys) if (key in held) == out]
    return side(False), side(True)


# The order of training.


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Which examples update `step` (from 0) shows: an endless shuffled stream,
    each epoch in a new order, cut into batches.

    A batch may reach over the end of an epoch. With `epochs`, the stream ends there and the last
    batch has what is left.

    Attributes:
      size: examples. batch: of an update. seed: of the orders. epochs: 0 is without end.
    """

    size: int
    batch: int
    seed: int
    epochs: int = 0

    @property
    def steps(self) -> int:
        """Updates of `epochs` epochs."""
        return -(-self.epochs * self.size // self.batch)

    def indices(self, step: int) -> np.ndarray:
        """i64[batch], or fewer in the last batch."""
        at = np.arange(step * self.batch, (step + 1) * self.batch)
        if self.epochs:
            at = at[at < self.epochs * self.size]
        orders = {
            epoch: np.random.default_rng([self.seed, epoch]).permutation(self.size)
            for epoch in {*(at // self.size)}
        }
        return np.array([orders[i // self.size][i % self.size] for i in at], np.int64)


# Rows.


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Which items share a row: best-fit decreasing, at most 11/9 of the fewest rows possible,
    plus four (Johnson 1973).

    Args:
      lengths: tokens of each item. capacity: tokens of a row.

    Returns:
      Indices into `lengths` for each row; ties go to the item, and to the row, that came first.

    Raises:
      ValueError: an item is longer than a row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        need = lengths[item]
        if need > capacity:
            raise ValueError(f"an example of {need} tokens does not fit into {capacity}")
        at = bisect.bisect_left(free, (need, -1))
        if at < len(free):
            left, row = free.pop(at)
        else:
            left, row = capacity, len(rows)
            rows.append([])
        rows[row].append(item)
        bisect.insort(free, (left - need, row))
    return rows


def lay_out(
    examples: Sequence[Example], length: int, packed: bool, count: int | None = None
) -> SFTBatch:
    """Rows of `length` tokens, with several examples each where they are packed (see `pack`), else
    with one and without segments; and empty ones up to `count`.

    Raises:
      ValueError: `count` rows are too few, or an example is longer than a row.
    """
    alone = [[i] for i in range(len(examples))]
    filled = pack([len(example) for example in examples], length) if packed else alone
    rows = len(filled) if count is None else count
    if len(filled) > rows:
        raise ValueError(
            f"{len(examples)} examples fill {len(filled)} rows of {length} tokens, more than {rows}"
        )
    batch = SFTBatch(*(np.zeros((rows, length), dtype) for dtype in (np.int32, np.bool_, np.int32)))
    for row, items in enumerate(filled):
        start = 0
        for segment, example in enumerate((examples[item] for item in items), 1):
            middle, end = start + len(example.prompt), start + len(example)
            if end > length:
                raise ValueError(f"an example of {len(example)} tokens does not fit into {length}")
            batch.tokens[row, start:middle] = example.prompt
            batch.tokens[row, middle:end] = example.response
            batch.mask[row, middle:end] = True
            batch.segments[row, start:end] = segment
            start = end
    return batch if packed else batch.replace(segments=None)


def spread_rows(batch: SFTBatch, pieces: int) -> SFTBatch:
    """Reorders rows so that micro-batches fill one after the other:
    row r goes to piece r mod `pieces`, and a piece of empty rows costs nothing.
    """
    rows = batch.tokens.shape[0]
    order = np.arange(rows).reshape(pieces, rows // pieces).T.ravel()
    return jax.tree.map(lambda x: x[order], batch)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The one shape of all batches of a run.

    Attributes:
      length: tokens of a row. rows: of a batch, a multiple of pieces. pieces: micro-batches.
        packed: several examples a row.
    """

    length: int
    rows: int
    pieces: int
    packed: bool

    def batch(self, examples: Sequence[Example]) -> SFTBatch:
        """These examples in this shape."""
        return spread_rows(lay_out(examples, self.length, self.packed, self.rows), self.pieces)

    def batches(self, examples: Sequence[Example]) -> list[SFTBatch]:
        """Any number of examples, in as many batches as they need, each of one piece's shape."""
        whole, rows = lay_out(examples, self.length, self.packed), self.rows // self.pieces
        pad = -len(whole.tokens) % rows
        whole = jax.tree.map(lambda x: np.pad(x, ((0, pad), (0, 0))), whole)
        return [
            jax.tree.map(lambda x: x[at : at + rows], whole)
            for at in range(0, len(whole.tokens), rows)
        ]

    def use(self, batch: SFTBatch) -> dict[str, float]:
        """What a batch of this shape holds: "input_tokens", those of its examples, and "use", their
        share of the positions that are computed (pieces of empty rows are not). For packed batches;
        {} for others, where padding is not told from token 0.
        """
        if batch.segments is None:
            return {}
        held = batch.segments > 0
        computed = held.any(1).reshape(-1, self.pieces).any(0).sum() * (held.size // self.pieces)
        return {"input_tokens": float(held.sum()), "use": float(held.sum() / computed)}


def make_layout(
    lengths: Sequence[int],
    batches: Callable[[], Iterator[np.ndarray]],
    max_length: int,
    packed: bool,
    micro_rows: int,
    shards: int,
) -> Layout:
    """The shape that holds every batch of a run, found by packing all of them (lengths alone: a
    second for 100,000 examples).

    Args:
      lengths: tokens of each example. batches: the indices of each batch.
      micro_rows: rows of a micro-batch, a multiple of `shards`; 0 takes all rows at once.

    Raises:
      ValueError: `micro_rows` cannot be split over `shards`.
    """
    if micro_rows % shards:
        raise ValueError(
            f"config.examples.micro_rows={micro_rows} rows cannot be split over "
            f"{shards} devices (config.mesh.data x config.mesh.fsdp): give a multiple"
        )
    lengths = np.asarray(lengths)
    if not packed:
        length, rows = int(lengths.max()), max(map(len, batches()))
    else:
        # No batch has more tokens than this: with little data a longer row would be padding in
        # every batch.
        longest = max(int(lengths[batch].sum()) for batch in batches())
        length = min(max_length, -(-longest // 8) * 8)
        rows = max(len(pack(lengths[batch].tolist(), length)) for batch in batches())
    unit = micro_rows or -(-rows // shards) * shards
    return Layout(length, -(-rows // unit) * unit, -(-rows // unit), packed)
