"""Scorers: from drawn samples to rewards, with the verifier that the configuration names."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rl_speed.config import Reward
from rl_speed.data.prompts import Prompt
from rl_speed.objectives import overlong_penalty
from rl_speed.rewards import MathVerifier, exact_match
from rl_speed.sampling.generate import Drawn


def decode_responses(tokenizer: Any, drawn: Drawn, end_tokens: Sequence[int]) -> list[str]:
    """Text of each response, without the end token that closed it."""
    texts = []
    for tokens, length in zip(drawn.tokens, drawn.lengths):
        ids = tokens[:length].tolist()
        texts.append(tokenizer.decode(ids[:-1] if ids and ids[-1] in end_tokens else ids))
    return texts


class ExactScorer:
    """Token-for-token equality with the answer, by the JAX verifier, in blocks of one shape (compiled once).

    Args:
      end_tokens: ids that end a response. answer_length: capacity of an answer in tokens. block: samples per call.
    """

    def __init__(self, end_tokens: Sequence[int], answer_length: int, block: int = 512):
        self._end, self._answer_length, self._block = tuple(end_tokens), answer_length, block
        self._verify = jax.jit(exact_match, static_argnames=("end_ids", "delimiter"))

    def __call__(self, prompts: Sequence[Prompt], drawn: Drawn) -> np.ndarray:
        # Samples of a prompt come one after the other: each answer is looked at once.
        starts = [row for row, prompt in enumerate(prompts) if row == 0 or prompt is not prompts[row - 1]]
        counts = np.diff([*starts, len(prompts)])
        answers = np.zeros((len(starts), self._answer_length), np.int32)
        answer_lengths = np.zeros((len(starts),), np.int32)
        for row, prompt in enumerate(prompts[start] for start in starts):
            if len(prompt.answer_tokens) == 0 or len(prompt.answer_tokens) > self._answer_length:
                raise ValueError(f"prompt {prompt.id!r}: its answer has {len(prompt.answer_tokens)} tokens; the exact "
                                 f"verifier takes 1 to {self._answer_length}")
            answers[row, :len(prompt.answer_tokens)] = prompt.answer_tokens
            answer_lengths[row] = len(prompt.answer_tokens)
        answers, answer_lengths = np.repeat(answers, counts, axis=0), np.repeat(answer_lengths, counts)
        correct = []
        for first in range(0, len(prompts), self._block):
            rows = slice(first, first + self._block)
            fill = lambda x: np.pad(x[rows], ((0, max(0, first + self._block - len(prompts))),) + ((0, 0),) * (x.ndim - 1))
            correct.append(np.asarray(self._verify(fill(drawn.tokens), fill(drawn.lengths), fill(answers),
                                                   fill(answer_lengths), end_ids=self._end)))
        return np.concatenate(correct)[:len(prompts)] if correct else np.zeros((0,), np.float32)


class MathScorer:
    """math-verify on decoded text, in killable worker processes."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], verifier: MathVerifier):
        self._tokenizer, self._end, self.verifier = tokenizer, tuple(end_tokens), verifier

    def __call__(self, prompts: Sequence[Prompt], drawn: Drawn) -> np.ndarray:
        return self.verifier.score(decode_responses(self._tokenizer, drawn, self._end), [p.answer for p in prompts])


class RewardScorer:
    """The verifier's verdict, plus DAPO's overlong penalty where configured: what the driver calls.

    Returns (rewards f32[n] to train on, correct bool[n] to screen and to report with).
    """

    def __init__(self, verify: ExactScorer | MathScorer, config: Reward, max_new: int):
        self.verify, self._config, self._max_new = verify, config, max_new

    def __call__(self, prompts: Sequence[Prompt], drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
        verdict = self.verify(prompts, drawn)
        rewards = verdict
        if self._config.overlong_buffer > 0:
            rewards = verdict + np.asarray(overlong_penalty(drawn.lengths, self._max_new, self._config.overlong_buffer,
                                                            self._config.overlong_factor))
        return rewards.astype(np.float32), verdict > 0.5

    def metrics(self) -> dict[str, float]:
        """Items by cause where a verifier process can fail: hung, crashed, out of memory, ..."""
        verifier = getattr(self.verify, "verifier", None)
        return {} if verifier is None else {f"verifier/{cause}": float(n) for cause, n in verifier.counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """The counts, which go on over a resumed run."""
        return {name.removeprefix("verifier/"): int(value) for name, value in self.metrics().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from where the state was taken."""
        verifier = getattr(self.verify, "verifier", None)
        if verifier is not None:
            verifier.counts.update({cause: int(n) for cause, n in state.items()})

    def close(self) -> None:
        """End the verifier's processes, if there are any."""
        verifier = getattr(self.verify, "verifier", None)
        if verifier is not None:
            verifier.close()
