"""Packs rows of any length into pieces of fixed size, so that the cost of an update grows with its
tokens.

Rows are assigned to shards so that shards have about equal numbers of tokens. The rows of a shard
are sorted by length, longest first, and packed into pieces of `tokens` tokens, each row whole. A
loop runs one program on each piece in use; nothing is padded to the longest row. Results per token
are unpacked into rows, because losses need whole rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl_speed.mesh import ROWS
from rl_speed.policy import ModelConfig
from rl_speed.policy.layers import adding
from rl_speed.policy.packed import Window, make_windows
from rl_speed.policy.transformer import trainable

Array = jax.Array

# Name scope of the loop over pieces in compiled programs.
LOOP = "pieces"


@dataclasses.dataclass(frozen=True)
class PieceShape:
    """Static shape of the pieces of one shard.

    Attributes:
      tokens: tokens of a piece. rows: most rows of a piece. width: tokens of the longest possible
        row.
      kernel: attention kernel, as named by `policy.transformer.attention_kernel`.
      windows: attention windows, ascending; see `policy.packed`.
    """

    tokens: int
    rows: int
    width: int
    kernel: str = "xla"

    @property
    def windows(self) -> tuple[Window, ...]:
        return make_windows(self.width, self.kernel)

    @classmethod
    def of(cls, rows: int, width: int, micro_tokens: int = 0, kernel: str = "xla") -> "PieceShape":
        """Returns the shape of pieces with about `micro_tokens` tokens, for a shard of `rows` rows;
        0: 1/32 of rows x width.

        A piece has room for the longest possible row, and for as many rows as fit if their mean
        length is width / 16.
        """
        largest = make_windows(width, kernel)[-1]
        tokens = max(micro_tokens or rows * width // 32, largest.size)
        tokens = -(-tokens // largest.block) * largest.block
        return cls(tokens, min(rows, 16 * -(-tokens // width)), width, kernel)


class Plan(NamedTuple):
    """Places of the rows of one shard in its pieces: i32[R] each, sorted by descending length.

    Attributes:
      row: index of the row. piece: number of its piece; `count` for rows without tokens.
      offset: position of its first token in the piece. length: its number of tokens.
      count: i32[], number of pieces in use.
    """

    row: Array
    piece: Array
    offset: Array
    length: Array
    count: Array


class Piece(NamedTuple):
    """One piece of one shard: M tokens of at most K rows.

    Attributes:
      tokens: i32[M], token ids. segment: i32[M], index of each token's row among the K, -1 after
        the last row. position: i32[M], of each token in its row.
      row: i32[K], index of each row among the rows of the shard; 0 if unused.
      used: bool[K], whether the place holds a row. offset: i32[K], position of the row's first
        token in the piece.
      length: i32[K], tokens of the row; 0 if unused.
      which: i32[], index of the smallest attention window that holds the longest row.
    """

    tokens: Array
    segment: Array
    position: Array
    row: Array
    used: Array
    offset: Array
    length: Array
    which: Array


def make_plan(lengths: Array, shape: PieceShape) -> Plan:
    """Assigns rows with `lengths` i32[R] to pieces, each row to one piece."""
    row = jnp.argsort(-lengths).astype(jnp.int32)
    length = lengths[row]

    def place(state, length):
        piece, tokens, rows = state
        full = (tokens + length > shape.tokens) | (rows == shape.rows)
        piece = piece + full
        tokens = jnp.where(full, 0, tokens)
        rows = jnp.where(full, 0, rows)
        return (piece, tokens + length, rows + 1), (piece, tokens)

    (_, _, _), (piece, offset) = jax.lax.scan(place, (jnp.int32(0),) * 3, length)
    count = jnp.max(jnp.where(length > 0, piece + 1, 0), initial=0)
    return Plan(row, jnp.where(length > 0, piece, count), offset, length, count)


def piece_of(plan: Plan, tokens_RxW: Array, number: Array, shape: PieceShape) -> Piece:
    """Returns piece `number`. A number past the last piece gives a piece without rows."""
    first = jnp.searchsorted(plan.piece, number).astype(jnp.int32)
    place = first + jnp.arange(shape.rows, dtype=jnp.int32)
    at = jnp.minimum(place, len(plan.row) - 1)
    used = (place < len(plan.row)) & (plan.piece[at] == number) & (number < plan.count)
    row = jnp.where(used, plan.row[at], 0)
    offset = jnp.where(used, plan.offset[at], shape.tokens)
    length = jnp.where(used, plan.length[at], 0)
    t = jnp.arange(shape.tokens, dtype=jnp.int32)
    slot = jnp.searchsorted(offset, t, side="right").astype(jnp.int32) - 1
    slot = jnp.clip(slot, 0, shape.rows - 1)
    position = t - offset[slot]
    held = (position >= 0) & (position < length[slot])
    position = jnp.where(held, position, 0)
    tokens = jnp.where(held, tokens_RxW[row[slot], position], 0)
    windows = jnp.asarray([window.size for window in shape.windows], jnp.int32)
    which = jnp.minimum(jnp.sum(windows < jnp.max(length, initial=0)), len(windows) - 1).astype(
        jnp.int32
    )
    return Piece(
        tokens,
        jnp.where(held, slot, -1),
        position,
        row=row,
        used=used,
        offset=offset,
        length=length,
        which=which,
    )


def rows_of(values_M: Array, piece: Piece, width: int) -> Array:
    """Unpacks values [M] of a piece into rows [K, width], each from its first token on.

    Values past a row's end are undefined.
    """
    at = piece.offset[:, None] + jnp.arange(width)
    return values_M[jnp.minimum(at, values_M.shape[0] - 1)]


def assign_rows(lengths: Array, shards: int) -> Array:
    """Assigns rows to shards: i32[S, R / S], indices of the rows of each shard. Shards differ in
    tokens by at most the longest row.

    Assigns the longest rows first, to shards in the order 0, 1, 2, 2, 1, 0, 0, ...
    """
    sorted_rows = jnp.argsort(-lengths).astype(jnp.int32).reshape(-1, shards)
    fro = jnp.arange(len(sorted_rows))[:, None] % 2 == 1
    return jnp.where(fro, sorted_rows[:, ::-1], sorted_rows).T


def _zeros_like(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


class Ragged:
    """The rows of one row shard, packed into pieces. Used inside `SplitWeights.run`.

    Args:
      tokens: i32[R, W], token ids. lengths: i32[R], tokens of each row, 0 for padding rows.
    """

    def __init__(self, tokens: Array, lengths: Array, shape: PieceShape):
        self.shape = shape
        self.tokens = tokens
        self._plan = make_plan(lengths, shape)
        # All shards loop as often as the fullest one, because they gather split weights together.
        self.count = jax.lax.pmax(self._plan.count, ROWS)

    def sum(self, function: Callable[[Array], Any], merge: Callable[[Any, Any], Any]) -> Any:
        """Combines `function(number)` of all pieces with `merge`, in a loop; starts at zeros."""
        zero = _zeros_like(jax.eval_shape(function, jnp.int32(0)))
        return self.loop(lambda number, total: merge(total, function(number)), zero)

    def gradients(
        self,
        loss: Callable[[Any, Array], tuple[Array, Any]],
        params: Any,
        model: ModelConfig,
        merge: Callable[[Any, Any], Any],
    ) -> tuple[Any, Any]:
        """Computes (auxiliary results of `loss`, combined over all pieces with `merge`; sum of the
        gradients, float32, a tree like that of `policy.transformer.trainable`).

        Args:
          loss: (params from `policy.layers.adding`, piece number) -> (f32[], auxiliary results).
        """

        def piece(totals, number):
            def value(totals):
                return loss(adding(params, totals, model), number)

            totals, found = jax.grad(value, has_aux=True)(totals)
            return found, totals

        def body(number, state):
            total, totals = state
            found, totals = piece(totals, number)
            return merge(total, found), totals

        totals = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable(model, params))
        found, _ = jax.eval_shape(piece, totals, jnp.int32(0))
        return self.loop(body, (_zeros_like(found), totals))

    def loop(self, body: Callable[[Array, Any], Any], state: Any) -> Any:
        """Runs state = body(number, state) for every piece in order. Returns the last state."""

        def step(pair):
            return (pair[0] + 1, body(*pair))

        with jax.named_scope(LOOP):

            def more(pair):
                return pair[0] < self.count

            return jax.lax.while_loop(more, step, (jnp.int32(0), state))[1]

    @property
    def computed(self) -> Array:
        """Capacity of the pieces in use, in tokens, f32[]."""
        return (self.count * self.shape.tokens).astype(jnp.float32)

    def piece(self, number: Array) -> Piece:
        return piece_of(self._plan, self.tokens, number, self.shape)

    def rows(self, values_M: Array, piece: Piece) -> Array:
        """Unpacks values [M] of a piece into rows [K, W - 1], without each row's last token."""
        return rows_of(values_M, piece, self.tokens.shape[1] - 1)

    def put(self, out: Array, values: Array, piece: Piece) -> Array:
        """Returns `out` [R, W - 1] with `values` [K, W - 1] written to the rows of the piece."""
        return out.at[jnp.where(piece.used, piece.row, len(out))].set(values, mode="drop")


class RowAssignment:
    """Splits the rows of a batch over row shards with about equal numbers of tokens, and joins them
    again.

    Args:
      lengths: i32[R], as for `Ragged`. shards: number of shards, which divides R.
    """

    def __init__(self, lengths: Array, shards: int):
        # With one shard, rows keep their order.
        self._rows = assign_rows(lengths, shards) if shards > 1 else None

    def split(self, x: Array) -> Array:
        """Splits rows [R, ...] into those of each shard, [S, R / S, ...]."""
        return x[None] if self._rows is None else x[self._rows]

    def join(self, x: Array) -> Array:
        """Inverse of `split`."""
        whole = x.reshape(-1, *x.shape[2:])
        return whole if self._rows is None else whole[jnp.argsort(self._rows.reshape(-1))]
