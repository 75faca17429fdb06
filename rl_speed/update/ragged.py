"""Packs rows of any length into pieces of fixed size, so that the cost of an update grows with its
tokens.

Rows are assigned to shards so that all have about as many tokens. A shard's rows are sorted by
length, longest first, and packed, each row whole, into pieces of `tokens` tokens. A loop runs one
program on each piece in use; nothing is padded to the longest row. The per-token results of a piece
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

# Name scope of the loop over pieces, in a program's text.
LOOP = "pieces"


@dataclasses.dataclass(frozen=True)
class PieceShape:
    """Static shape of the pieces of one shard.

    Attributes:
      tokens: of a piece. rows: most rows of a piece. width: tokens of the longest possible row.
      kernel: of attention, as named by `policy.transformer.attention_kernel`.
      windows: of attention, ascending; see `policy.packed`.
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
        """Pieces of about `micro_tokens` tokens for a shard of `rows` rows; 0: 1/32 of its
        capacity.

        A piece holds at least the longest row, and has room for rows of a sixteenth of that width.
        """
        largest = make_windows(width, kernel)[-1]
        tokens = max(micro_tokens or rows * width // 32, largest.size)
        tokens = -(-tokens // largest.block) * largest.block
        return cls(tokens, min(rows, 16 * -(-tokens // width)), width, kernel)


class Plan(NamedTuple):
    """Places of one shard's rows: i32[R] each, by descending length.

    Attributes:
      row: the row's index. piece: its piece; for rows without tokens, one after the last. offset:
        position of its first token in the piece.
      length: its tokens. count: i32[], pieces in use.
    """

    row: Array
    piece: Array
    offset: Array
    length: Array
    count: Array


class Piece(NamedTuple):
    """One piece of one shard: M tokens of at most K rows.

    Attributes:
      tokens: i32[M]. segment: i32[M], the row's index among the K, -1 after the last row. position:
        i32[M], in the row.
      row: i32[K], index among the shard's rows; 0 if unused. used: bool[K]. offset: i32[K].
      length: i32[K], tokens of the row; 0 if unused.
      which: i32[], index of the window that holds the longest of the rows.
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
    """Assigns rows of `lengths` i32[R] to pieces, each row whole in one piece."""
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
    """Piece `number`; one after the last has no rows."""
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
    """[K, width]: values of each row in the stream, from its first token on.

    Values past a row's end are undefined.
    """
    at = piece.offset[:, None] + jnp.arange(width)
    return values_M[jnp.minimum(at, values_M.shape[0] - 1)]


def assign_rows(lengths: Array, shards: int) -> Array:
    """i32[S, R / S]: rows of each shard. Tokens of shards differ by at most the longest row.

    The longest rows are assigned first, in the order 0, 1, 2, 2, 1, 0, 0, ...
    """
    sorted_rows = jnp.argsort(-lengths).astype(jnp.int32).reshape(-1, shards)
    fro = jnp.arange(len(sorted_rows))[:, None] % 2 == 1
    return jnp.where(fro, sorted_rows[:, ::-1], sorted_rows).T


def _zeros_like(shapes: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


class Ragged:
    """The rows of one row shard in pieces, used inside `SplitWeights.run`.

    Args:
      tokens: i32[R, W]. lengths: i32[R], tokens of each row, 0 for padding rows.
    """

    def __init__(self, tokens: Array, lengths: Array, shape: PieceShape):
        self.shape = shape
        self.tokens = tokens
        self._plan = make_plan(lengths, shape)
        # The count of the fullest shard: gathering the layers of split weights needs all shards.
        self.count = jax.lax.pmax(self._plan.count, ROWS)

    def sum(self, function: Callable[[Array], Any], merge: Callable[[Any, Any], Any]) -> Any:
        """Merges `function(number)` over all pieces by `merge`; zeros if there are none. One
        program, in a loop.
        """
        zero = _zeros_like(jax.eval_shape(function, jnp.int32(0)))
        return self.loop(lambda number, total: merge(total, function(number)), zero)

    def gradients(
        self,
        loss: Callable[[Any, Array], tuple[Array, Any]],
        params: Any,
        model: ModelConfig,
        merge: Callable[[Any, Any], Any],
    ) -> tuple[Any, Any]:
        """(second results of `loss` merged over all pieces by `merge`, sum of the gradients,
        float32, a tree from `policy.transformer.trainable`).

        Args:
          loss: (params as from `policy.layers.adding`, number) -> (f32[], anything).
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
        """Runs state = body(number, state) for every piece, in order."""

        def step(pair):
            return (pair[0] + 1, body(*pair))

        with jax.named_scope(LOOP):

            def more(pair):
                return pair[0] < self.count

            return jax.lax.while_loop(more, step, (jnp.int32(0), state))[1]

    @property
    def computed(self) -> Array:
        """f32[]: capacity of the pieces in use, in tokens."""
        return (self.count * self.shape.tokens).astype(jnp.float32)

    def piece(self, number: Array) -> Piece:
        return piece_of(self._plan, self.tokens, number, self.shape)

    def rows(self, values_M: Array, piece: Piece) -> Array:
        """[K, W - 1]: values at all tokens but the last of each row of the piece."""
        return rows_of(values_M, piece, self.tokens.shape[1] - 1)

    def put(self, out: Array, values: Array, piece: Piece) -> Array:
        """`out` [R, W - 1] with [K, W - 1] written to the rows of a piece."""
        return out.at[jnp.where(piece.used, piece.row, len(out))].set(values, mode="drop")


class RowAssignment:
    """Assigns a batch's rows to row shards with about equal tokens, and back.

    Args:
      lengths: i32[R], as for `Ragged`. shards: their number, which divides R.
    """

    def __init__(self, lengths: Array, shards: int):
        # One shard keeps the order.
        self._rows = assign_rows(lengths, shards) if shards > 1 else None

    def split(self, x: Array) -> Array:
        """[R, ...] -> [S, R / S, ...], each row on its shard."""
        return x[None] if self._rows is None else x[self._rows]

    def join(self, x: Array) -> Array:
        """Inverse of `split`."""
        whole = x.reshape(-1, *x.shape[2:])
        return whole if self._rows is None else whole[jnp.argsort(self._rows.reshape(-1))]
