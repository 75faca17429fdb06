"""Verifier for responses with written-out steps, in the compiled loop."""

import dataclasses

import jax
import jax.numpy as jnp

from rl_speed.rewards.exact import first_end


@dataclasses.dataclass(frozen=True)
class ScratchpadMatch:
    """Tests whether a response's results equal the answer's tokens; a verifier for
    `sample_adaptive`.

    A result is the token after an `equals` token; a `back` token right after it removes it. A
    response without an end token was truncated and is incorrect. The arguments are those of
    `ExactMatch`, with the expected results as answers.
    """

    end_ids: tuple[int, ...]
    equals: int
    back: int

    def __call__(
        self, tokens: jax.Array, lengths: jax.Array, answer: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        answers, answer_lengths = answer
        ended_R, end_R = first_end(tokens, lengths, self.end_ids)
        inside_RxT = jnp.arange(tokens.shape[1]) < end_R[:, None]

        no_R = jnp.zeros((len(tokens), 1), bool)
        behind_RxT = jnp.concatenate([no_R, (tokens == self.equals)[:, :-1]], axis=1)
        back_RxT = (tokens == self.back) & inside_RxT
        taken_back_RxT = jnp.concatenate([back_RxT[:, 1:], no_R], axis=1)
        stands_RxT = behind_RxT & ~taken_back_RxT & inside_RxT
        rank_RxT = jnp.clip(jnp.cumsum(stands_RxT, axis=1) - 1, 0, answers.shape[1] - 1)
        expected_RxT = jnp.take_along_axis(answers, rank_RxT, axis=1)
        same_R = jnp.all(~stands_RxT | (tokens == expected_RxT), axis=1)
        right_count_R = stands_RxT.sum(axis=1) == answer_lengths
        return (ended_R & right_count_R & same_R).astype(jnp.float32)
