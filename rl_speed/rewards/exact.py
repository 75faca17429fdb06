"""Exact match of token sequences, a verifier for the compiled loop."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ExactMatch:
    """Tests whether a response's tokens equal the answer's; a verifier for `sample_adaptive`.

    Maps (tokens i32[R, T], lengths i32[R], (answers i32[R, A], answer_lengths i32[R])) to f32[R], 0
    or 1. Answers have no end token. Tokens beyond a length are ignored, so the padding token may be
    an end token.

    Attributes:
      end_ids: end tokens; the first of them ends a response. A response without one was truncated
        and is incorrect.

    Raises:
      ValueError: end_ids is empty.
    """

    end_ids: tuple[int, ...]

    def __post_init__(self):
        if not self.end_ids:
            raise ValueError(
                "end_ids is empty; give the end tokens, without which no response is complete"
            )

    def __call__(
        self, tokens: jax.Array, lengths: jax.Array, answer: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        answers, answer_lengths = answer
        ended_R, end_R = first_end(tokens, lengths, self.end_ids)
        position_A = jnp.arange(answers.shape[1])
        same_RxA = tokens[:, jnp.minimum(position_A, tokens.shape[1] - 1)] == answers
        same_R = jnp.all(same_RxA | (position_A >= answer_lengths[:, None]), axis=1)
        return (ended_R & (end_R == answer_lengths) & same_R).astype(jnp.float32)


def first_end(
    tokens: jax.Array, lengths: jax.Array, end_ids: tuple[int, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns (whether each row has an end token, bool[R]; its first position, i32[R], else 0)."""
    is_end_RxT = jnp.isin(tokens, jnp.asarray(end_ids, tokens.dtype))
    is_end_RxT &= jnp.arange(tokens.shape[1]) < lengths[:, None]
    return is_end_RxT.any(axis=1), jnp.argmax(is_end_RxT, axis=1)


def pad_answers(
    answers: Sequence[np.ndarray], capacity: int = 0, names: Sequence[str] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Pads ragged answers to (tokens i32[P, capacity], lengths i32[P]), for `ExactMatch`.

    Args:
      capacity: tokens per answer; 0: the length of the longest.
      names: names of the answers for errors; default: their indices.

    Raises:
      ValueError: an answer is empty or too long.
    """
    lengths = np.array([len(ids) for ids in answers], np.int32)
    padded = np.zeros((len(answers), capacity or max(1, *lengths)), np.int32)
    for row, ids in enumerate(answers):
        if not 1 <= len(ids) <= padded.shape[1]:
            raise ValueError(
                f"{names[row] if names else row}: its answer has {len(ids)} tokens; the exact "
                f"verifier takes 1 to {padded.shape[1]}"
            )
        padded[row, : len(ids)] = ids
    return padded, lengths
