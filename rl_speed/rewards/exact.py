"""Exact match of token sequences: a verifier that runs inside the compiled sampler."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """`exact_match` as a verifier for `sample_adaptive`; hashable by its settings.

    Called with (tokens i32[S, T], lengths i32[S], (answers i32[S, A], answer_lengths i32[S]));
    returns f32[S].
    """

    end_ids: tuple[int, ...]
    delimiter: int | None = None

    def __call__(
        self, tokens: jax.Array, lengths: jax.Array, answer: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        return exact_match(tokens, lengths, *answer, end_ids=self.end_ids, delimiter=self.delimiter)


def pad_answers(answers: Sequence[np.ndarray], capacity: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[P, capacity], lengths i32[P]) of ragged answers, for `ExactMatch`. Capacity 0:
    the longest answer.

    Raises ValueError with the answer that is empty or too long.
    """
    lengths = np.array([len(ids) for ids in answers], np.int32)
    padded = np.zeros((len(answers), capacity or max(1, *lengths)), np.int32)
    for row, ids in enumerate(answers):
        if not 1 <= len(ids) <= padded.shape[1]:
            raise ValueError(
                f"answer {row} has {len(ids)} tokens; the exact verifier takes 1 to "
                f"{padded.shape[1]}"
            )
        padded[row, : len(ids)] = ids
    return padded, lengths


def exact_match(
    tokens: jax.Array,
    lengths: jax.Array,
    answers: jax.Array,
    answer_lengths: jax.Array,
    end_ids: tuple[int, ...],
    delimiter: int | None = None,
) -> jax.Array:
    """1 if the response's tokens are the answer's, else 0.

    Args:
      tokens: i32[R, T], the responses, with the end token if one was generated.
      lengths: i32[R], valid tokens of each row. Later tokens are not read, so the padding token may
        equal an end token.
      answers: i32[R, A], the expected tokens, without an end token.
      answer_lengths: i32[R], valid tokens of each answer, at most A.
      end_ids: static; the first of these ends the response. A response without one was truncated
        and is incorrect.
      delimiter: static; if given, only tokens after its last occurrence are compared, and a
        response without it is incorrect.

    Returns:
      f32[R].

    Raises:
      ValueError: end_ids is empty: no response could be correct.
    """
    if not end_ids:
        raise ValueError("end_ids is empty; a response is complete only with an end token")
    num_tokens = tokens.shape[1]
    num_answer = answers.shape[1]
    position_T = jnp.arange(num_tokens)
    is_end_RxT = jnp.isin(tokens, jnp.asarray(end_ids, tokens.dtype))
    is_end_RxT &= position_T < lengths[:, None]
    ended_R = is_end_RxT.any(axis=1)
    end_R = jnp.argmax(is_end_RxT, axis=1)

    start_R = jnp.zeros_like(end_R)
    marked_R = jnp.ones_like(ended_R)
    if delimiter is not None:
        is_mark_RxT = (tokens == delimiter) & (position_T < end_R[:, None])
        marked_R = is_mark_RxT.any(axis=1)
        start_R = jnp.max(jnp.where(is_mark_RxT, position_T + 1, 0), axis=1)

    position_A = jnp.arange(num_answer)
    source_RxA = jnp.minimum(start_R[:, None] + position_A, num_tokens - 1)
    same_RxA = jnp.take_along_axis(tokens, source_RxA, axis=1) == answers
    same_R = jnp.all(same_RxA | (position_A >= answer_lengths[:, None]), axis=1)
    right_length_R = end_R - start_R == answer_lengths
    return (ended_R & marked_R & right_length_R & same_R).astype(jnp.float32)
