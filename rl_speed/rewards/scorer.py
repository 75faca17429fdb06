"""Scorers: from drawn samples to rewards, with the verifier that the configuration names."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rl_speed.config import Reward
from rl_speed.data.prompts import Prompt
from rl_speed.objectives import overlong_penalty
from rl_speed.rewards import FunctionRewards, MathVerifier, encode_answers, format_reward, language_reward, pad_answers
from rl_speed.rewards.custom import parse_extra
from rl_speed.sampling.adaptive import Verify
from rl_speed.sampling.generate import Drawn


# Where the state has the counts of extra rewards, and the sums of a step under way, beside causes: no cause has a space.
_EXTRA, _PARTS = "extra rewards", "parts so far"


def decode_responses(tokenizer: Any, drawn: Drawn, end_tokens: Sequence[int]) -> list[str]:
    """Text of each response, without the end token that closed it."""
    return decode_rows(tokenizer, drawn.tokens, drawn.lengths, end_tokens)


def decode_rows(tokenizer: Any, tokens: np.ndarray, lengths: np.ndarray, end_tokens: Sequence[int]) -> list[str]:
    """`decode_responses` of tokens i32[n, T] and lengths i32[n]."""
    texts = []
    for row, length in zip(tokens, lengths):
        ids = row[:length].tolist()
        texts.append(tokenizer.decode(ids[:-1] if ids and ids[-1] in end_tokens else ids))
    return texts


def ended_rows(tokens: np.ndarray, lengths: np.ndarray, end_tokens: Sequence[int]) -> np.ndarray:
    """bool[n]: whether the last of each row's tokens is an end token. An empty row has none."""
    last = tokens[np.arange(len(lengths)), np.maximum(lengths - 1, 0)]
    return (lengths > 0) & np.isin(last, list(end_tokens))


def exact_answers(prompts: Sequence[Prompt], capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[P, capacity], lengths i32[P]) of the answers, as `ExactMatch` takes them.

    Raises ValueError for an answer that is empty or too long.
    """
    for prompt in prompts:
        if not 1 <= len(prompt.answer_tokens) <= capacity:
            raise ValueError(f"prompt {prompt.id!r}: its answer has {len(prompt.answer_tokens)} tokens; the exact verifier takes 1 "
                             f"to {capacity}")
    return pad_answers([p.answer_tokens for p in prompts], capacity)


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


def answer_text(prompt: Prompt) -> str:
    """What math-verify has to know of a prompt."""
    return prompt.answer


def prompt_text(prompt: Prompt) -> str:
    """What a function of the user's own may ask about a prompt, as JSON. Raises ValueError naming a prompt whose `meta` is none."""
    try:
        return json.dumps([prompt.answer, prompt.text, prompt.meta])
    except (TypeError, ValueError) as error:
        raise ValueError(f"prompt {prompt.id!r}: what the data has beside question and answer cannot be taken into the compiled "
                         f"loop ({error})") from None


def text_answers(prompts: Sequence[Prompt], capacity: int, of: Callable[[Prompt], str] = answer_text) -> np.ndarray:
    """A text of each prompt as u8[P, capacity], UTF-8 with zeros behind it, as `MathJudge` and `FunctionJudge` take them.

    Raises ValueError naming the prompt whose text is longer.
    """
    answers = np.zeros((len(prompts), capacity), np.uint8)
    for row, prompt in enumerate(prompts):
        text = of(prompt).encode("utf-8")
        if len(text) > capacity:
            raise ValueError(f"prompt {prompt.id!r}: what its verifier needs to know takes {len(text)} bytes; there is room for "
                             f"{capacity} inside the compiled loop. config.driver.where='host' takes any")
        answers[row, :len(text)] = np.frombuffer(text, np.uint8)
    return answers


class JaxScorer:
    """A verifier of `sample_adaptive`, on the host: in blocks of one shape, so that it compiles once.

    Args:
      verify: (tokens, lengths, answer) -> rewards. encode: prompts -> the answer's pytree, a row each. block: samples per call.
    """

    def __init__(self, verify: Verify, encode: Callable[[Sequence[Prompt]], Any], block: int = 512):
        self._verify, self._encode, self._block = jax.jit(verify), encode, block

    def __call__(self, prompts: Sequence[Prompt], drawn: Drawn, texts: Sequence[str] | None = None) -> np.ndarray:
        """f32[n]. `texts` is for verifiers that read text."""
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

    def __call__(self, prompts: Sequence[Prompt], drawn: Drawn, texts: list[str] | None = None) -> np.ndarray:
        """f32[n]. `texts`: the responses, where somebody has decoded them already."""
        texts = decode_responses(self._tokenizer, drawn, self._end) if texts is None else texts
        return self.verifier.score(texts, [p.answer for p in prompts])


class MathJudge:
    """`MathScorer` as `HostVerify` calls it: (tokens i32[n, T], lengths i32[n], u8[n, A] of `text_answers`) -> f32[n].

    What it is to know of a prompt comes with the sample, so that there is nothing to save or to restore; the workers and their
    counts are the verifier's.
    """

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], verifier: MathVerifier):
        self._tokenizer, self._end, self._verifier = tokenizer, tuple(end_tokens), verifier

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray, answer: np.ndarray) -> np.ndarray:
        return self._verifier.score(decode_rows(self._tokenizer, tokens, lengths, self._end), texts_of(answer))


def texts_of(rows: np.ndarray) -> list[str]:
    """The texts that `text_answers` made u8[n, A] of."""
    return [row.tobytes().rstrip(b"\0").decode("utf-8") for row in rows]


def function_samples(prompts: Sequence[tuple[str, str, dict[str, Any]]], texts: Sequence[str], tokens: np.ndarray,
                     lengths: np.ndarray, end_tokens: Sequence[int]) -> list[dict[str, Any]]:
    """What reward functions of the user's own are given of each response; `prompts` are (answer, question, meta)."""
    ended = ended_rows(tokens, lengths, end_tokens)
    return [{"response": text, "answer": answer, "question": question, "meta": meta, "length": int(length), "ended": bool(end)}
            for (answer, question, meta), text, length, end in zip(prompts, texts, lengths, ended, strict=True)]


class FunctionScorer:
    """A function of the user's own as the verifier, in killable worker processes."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], verifier: FunctionRewards):
        self._tokenizer, self._end, self.verifier = tokenizer, tuple(end_tokens), verifier

    def __call__(self, prompts: Sequence[Prompt], drawn: Drawn, texts: list[str] | None = None) -> np.ndarray:
        """f32[n]. `texts`: the responses, where somebody has decoded them already."""
        texts = decode_responses(self._tokenizer, drawn, self._end) if texts is None else texts
        known = [(p.answer, p.text, p.meta) for p in prompts]
        return self.verifier.score(function_samples(known, texts, drawn.tokens, drawn.lengths, self._end))[0]


class FunctionJudge:
    """`FunctionScorer` as `HostVerify` calls it: (tokens i32[n, T], lengths i32[n], u8[n, A] of `prompt_text`) -> f32[n]."""

    def __init__(self, tokenizer: Any, end_tokens: Sequence[int], verifier: FunctionRewards):
        self._tokenizer, self._end, self._verifier = tokenizer, tuple(end_tokens), verifier

    def __call__(self, tokens: np.ndarray, lengths: np.ndarray, answer: np.ndarray) -> np.ndarray:
        known = [tuple(json.loads(text)) for text in texts_of(answer)]
        texts = decode_rows(self._tokenizer, tokens, lengths, self._end)
        return self._verifier.score(function_samples(known, texts, tokens, lengths, self._end))[0]


class RewardScorer:
    """What the driver calls: the verifier's verdict, and the reward that is trained on.

    The reward is a sum: the verdict times its weight, format and language rewards (Bae et al., arXiv 2504.03380; with weights of 1
    it lies in [0, 3]), DAPO's overlong penalty, and functions of the user's own, each with its weight and where configured. The
    verdict alone says what is correct: every filter looks at that. A response that non-finite logits ended is wrong and earns 0.

    Args:
      verify: (prompts, samples, their texts or None) -> verdicts f32[n]. max_new: the length limit of a response, in tokens.
      tokenizer, end_tokens: to decode with, once for all that read text. functions: what `config.extra` names, in that order.
    """

    def __init__(self, verify: JaxScorer | MathScorer | FunctionScorer, config: Reward, max_new: int, tokenizer: Any,
                 end_tokens: Sequence[int], functions: FunctionRewards | None = None):
        self.verify, self._config, self._max_new = verify, config, max_new
        self._functions, self._extra = functions, parse_extra(config.extra)
        self._tokenizer, self._end = tokenizer, tuple(end_tokens)
        self._sums: dict[str, float] = {}
        self._scored = 0

    def __call__(self, prompts: Sequence[Prompt], drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
        """(rewards f32[n] to train on, correct bool[n] to screen and to report with)."""
        c = self._config
        reads = c.format_weight > 0 or c.language_weight > 0 or self._functions is not None
        texts = decode_responses(self._tokenizer, drawn, self._end) if reads else None
        verdict = self.verify(prompts, drawn, texts)
        rewards = np.zeros(len(verdict), np.float32)
        self._scored += len(verdict)
        for name, weight, part in [("accuracy", c.accuracy_weight, verdict), *self._parts(prompts, drawn, texts)]:
            part = np.where(drawn.nonfinite, 0, part)  # the policy broke down: what it said before earns nothing
            rewards += np.float32(weight) * part
            self._sums[name] = self._sums.get(name, 0.0) + float(part.sum(dtype=np.float64))
        return rewards, (verdict > 0.5) & ~drawn.nonfinite

    def judge(self, prompts: Sequence[Prompt], drawn: Drawn) -> np.ndarray:
        """correct bool[n] alone, of held-out responses: nothing is added to the means of `take_parts`."""
        return (self.verify(prompts, drawn) > 0.5) & ~drawn.nonfinite

    def _parts(self, prompts: Sequence[Prompt], drawn: Drawn,
               texts: list[str] | None) -> Iterator[tuple[str, float, np.ndarray]]:
        """(name, weight, reward f32[n]) of each part beside accuracy."""
        c = self._config
        if c.format_weight > 0:
            opened = [c.think_open + text for text in texts] if c.think_in_prompt else texts
            ended = ended_rows(drawn.tokens, drawn.lengths, self._end)
            yield "format", c.format_weight, format_reward(opened, ended, think_open=c.think_open, think_close=c.think_close)
        if c.language_weight > 0:
            yield "language", c.language_weight, language_reward(texts)
        if c.overlong_buffer > 0:
            yield "overlong", 1.0, np.asarray(overlong_penalty(drawn.lengths, self._max_new, c.overlong_buffer, c.overlong_factor))
        if self._functions is not None:
            known = [(p.answer, p.text, p.meta) for p in prompts]
            values = self._functions.score(function_samples(known, texts, drawn.tokens, drawn.lengths, self._end))
            for extra, part in zip(self._extra, values, strict=True):
                yield extra.name, extra.weight, part

    def take_parts(self) -> dict[str, float]:
        """Means of the reward's parts, unweighted, accuracy among them, over the responses scored since the last call (the step's,
        rejected prompts included). Empty where nothing was."""
        means = {f"reward/{name}": total / self._scored for name, total in self._sums.items() if self._scored}
        self._sums, self._scored = {}, 0
        return means

    def _workers(self) -> dict[str, Any]:
        """What has worker processes, by the name under which its items are counted."""
        found = {"verifier": getattr(self.verify, "verifier", None), "extra": self._functions}
        return {name: workers for name, workers in found.items() if workers is not None}

    def metrics(self) -> dict[str, float]:
        """Items by cause where a verifier's or a function's process can fail: hung, crashed, out of memory, ..."""
        return {f"{name}/{cause}": float(n) for name, workers in self._workers().items() for cause, n in workers.counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """The counts, which go on over a resumed run; and the sums of a step that was stopped before its `take_parts`."""
        count = lambda workers: {cause: int(n) for cause, n in workers.counts.items()}
        found = {name: count(workers) for name, workers in self._workers().items()}
        return {**found.get("verifier", {}), **({_EXTRA: found["extra"]} if "extra" in found else {}),
                **({_PARTS: json.dumps([self._scored, self._sums])} if self._scored else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from where the state was taken."""
        for name, workers in self._workers().items():
            counts = state.get(_EXTRA, {}) if name == "extra" else {c: n for c, n in state.items() if c not in (_EXTRA, _PARTS)}
            workers.counts.update({cause: int(n) for cause, n in counts.items()})
        self._scored, self._sums = json.loads(state[_PARTS]) if _PARTS in state else (0, {})

    def close(self) -> None:
        """End the processes, if there are any."""
        for workers in self._workers().values():
            workers.close()
