"""Scorers: from drawn samples to rewards, with the verifier that the configuration names."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rl_speed.config import Reward
from rl_speed.data.prompts import Prompt
from rl_speed.objectives import overlong_penalty
from rl_speed.rewards import MathVerifier, encode_answers
from rl_speed.sampling.adaptive import Verify
from rl_speed.sampling.generate import Drawn


def decode_responses(tokenizer: Any, drawn: Drawn, end_tokens: Sequence[int]) -> list[str]:
    """Text of each response, without the end token that closed it."""
    texts = []
    for tokens, length in zip(drawn.tokens, drawn.lengths):
        ids = tokens[:length].tolist()
        texts.append(tokenizer.decode(ids[:-1] if ids and ids[-1] in end_tokens else ids))
    return texts


def exact_answers(prompts: Sequence[Prompt], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[P, capacity], lengths i32[P]) of the answers, as `ExactMatch` takes them.

    Raises ValueError for an answer that is empty or too long.
    """
    answers = np.zeros((len(prompts), capacity), np.int32)
    lengths = np.array([len(p.answer_tokens) for p in prompts], np.int32)
    for row, prompt in enumerate(prompts):
        if not 1 <= lengths[row] <= capacity:
            raise ValueError(f"prompt {prompt.id!r}: its answer has {lengths[row]} tokens; the exact verifier takes 1 to {capacity}")
        answers[row, :lengths[row]] = prompt.answer_tokens
    return answers, lengths


def integer_answers(prompts: Sequence[Prompt]) -> np.ndarray:
    """The answers as `IntegerMatch` takes them. Raises ValueError naming the prompt whose answer is no integer."""
    try:
        return encode_answers([p.answer for p in prompts])
    except ValueError as error:
        for prompt in prompts:
            try:
                encode_answers([prompt.answer])
            except ValueError:
                raise ValueError(f"prompt {prompt.id!r}: {error}") from None
        raise


class JaxScorer:
    """A verifier of `sample_adaptive`, on the host: in blocks of one shape, so that it compiles once.

    Args:
      verify: (tokens, lengths, answer) -> rewards. encode: prompts -> the answer's pytree, a row each. block: samples per call.
    """

    def __init__(self, verify: Verify, encode: Callable[[Sequence[Prompt]], Any], block: int = 512):
        self._verify, self._encode, self._block = jax.jit(verify), encode, block

    def __call__(self, prompts: Sequence[Prompt], drawn: Drawn) -> np.ndarray:
        # Samples of a prompt come one after the other: each answer is looked at once.
        starts = [row for row, prompt in enumerate(prompts) if row == 0 or prompt is not prompts[row - 1]]
        counts = np.diff([*starts, len(prompts)])
        answers = jax.tree.map(lambda x: np.repeat(x, counts, axis=0), self._encode([prompts[start] for start in starts]))
        correct = []
        for first in range(0, len(prompts), self._block):
            rows = slice(first, first + self._block)
            fill = lambda x: np.pad(x[rows], ((0, max(0, first + self._block - len(prompts))),) + ((0, 0),) * (x.ndim - 1))
            correct.append(np.asarray(self._verify(fill(drawn.tokens), fill(drawn.lengths), jax.tree.map(fill, answers))))
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

    def __init__(self, verify: JaxScorer | MathScorer, config: Reward, max_new: int):
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
