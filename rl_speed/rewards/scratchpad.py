"""Verifier for responses with written-out steps, inside the compiled sampler."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class ScratchpadMatch:
    """`scratchpad_match` as a verifier for `sample_adaptive`; hashable by its settings.

    Called with (tokens i32[S, T], lengths i32[S], (answers i32[S, A], answer_lengths i32[S]));
    returns f32[S].
    """

    end_ids: tuple[int, ...]
    equals: int
    back: int

    def __call__(
        self, tokens: jax.Array, lengths: jax.Array, answer: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        return scratchpad_match(tokens, lengths, *answer, self.end_ids, self.equals, self.back)


def scratchpad_match(
    tokens: jax.Array,
    lengths: jax.Array,
    answers: jax.Array,
    answer_lengths: jax.Array,
    end_ids: tuple[int, ...],
    equals: int,
    back: int,
) -> jax.Array:
    """1 if the response's remaining results are the answer's tokens, in order, else 0.

    A result is the token after each `equals`. A `back` right after a result removes it.

    Args:
      tokens: i32[R, T], the responses, with the end token if one was generated.
      lengths: i32[R], valid tokens of each row.
      answers: i32[R, A], the expected results. answer_lengths: i32[R], valid ones, at most A.
      end_ids, equals, back: static. The first of end_ids ends the response; a response without one
        was truncated and is incorrect.

    Returns:
      f32[R].
    """
    num_rows, num_tokens = tokens.shape
    position_T = jnp.arange(num_tokens)
    is_end_RxT = jnp.isin(tokens, jnp.asarray(end_ids, tokens.dtype))
    is_end_RxT &= position_T < lengths[:, None]
    ended_R = is_end_RxT.any(axis=1)
    inside_RxT = position_T < jnp.argmax(is_end_RxT, axis=1)[:, None]

    no_R = jnp.zeros((num_rows, 1), bool)
    behind_RxT = jnp.concatenate([no_R, (tokens == equals)[:, :-1]], axis=1)
    taken_back_RxT = jnp.concatenate([((tokens == back) & inside_RxT)[:, 1:], no_R], axis=1)
    stands_RxT = behind_RxT & ~taken_back_RxT & inside_RxT
    rank_RxT = jnp.cumsum(stands_RxT, axis=1) - 1
    expected_RxT = jnp.take_along_axis(answers, jnp.clip(rank_RxT, 0, answers.shape[1] - 1), axis=1)
    same_R = jnp.all(~stands_RxT | (tokens == expected_RxT), axis=1)
    right_count_R = stands_RxT.sum(axis=1) == answer_lengths
    return (ended_R & right_count_R & same_R).astype(jnp.float32)
