"""Draw responses to prompts, call by call, and measure a policy on them."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rl_speed.data.prompts import Prompt
from rl_speed.data.rollouts import Rollouts
from rl_speed.rollout.generate import GenerationStats, Generator, SampleRequest
from rl_speed.theory.pass_at_k import all_at_k, pass_at_k


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Results per prompt, host arrays.

    Attributes:
      correct: i64[P], right responses out of `samples` each. lengths: f64[P], mean response
        length in tokens.
      truncated: f64[P], share of responses that hit the limit. entropy: f64[P], mean of -log-prob
        over a response's tokens, in nats, an estimate of the policy's entropy a token. classes:
        each prompt's class, "" where it has none.
      stats: what generating them cost, and how many of them non-finite logits ended.
    """

    samples: int
    correct: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    entropy: np.ndarray
    classes: tuple[str, ...]
    stats: GenerationStats

    @property
    def accuracy(self) -> float:
        """average@samples: mean pass rate over prompts."""
        return float(self.correct.mean() / self.samples)

    @property
    def standard_error(self) -> float:
        """Of `accuracy`, from the sampling of responses to these prompts (not from the choice of
        prompts). One response each does not tell how pass rates differ: then it is as if all were
        equal, which is never too small.
        """
        p = self.correct / self.samples
        if self.samples == 1:
            p = np.full_like(p, p.mean())
        return float(np.sqrt((p * (1 - p)).sum() / max(self.samples - 1, 1)) / len(p))

    def metrics(self) -> dict[str, float]:
        """Scalars to log; accuracy and entropy by class where prompts have classes;
        pass@k, and the probability that k responses are all right, for k = 2, 4, 8, ... up to
        `samples`.
        """
        out = {
            "eval/accuracy": self.accuracy,
            "eval/length": float(self.lengths.mean()),
            "eval/truncated": float(self.truncated.mean()),
            "eval/entropy": float(self.entropy.mean()),
            "eval/nonfinite": float(self.stats.nonfinite),
        }
        for k in (2**i for i in range(1, self.samples.bit_length())):
            out[f"eval/pass_at_{k}"] = float(pass_at_k(self.correct, self.samples, k).mean())
            out[f"eval/all_at_{k}"] = float(all_at_k(self.correct, self.samples, k).mean())
        for name in sorted(set(self.classes) - {""}):
            rows = np.array([c == name for c in self.classes])
            out[f"eval/accuracy_{name}"] = float(self.correct[rows].mean() / self.samples)
            out[f"eval/entropy_{name}"] = float(self.entropy[rows].mean())
        return out


@dataclasses.dataclass
class EvaluationSoFar:
    """An evaluation that was stopped between two calls.

    Attributes:
      table: f64[4, P]: for each prompt that is done, right responses, mean length, share truncated,
        mean surprise.
      stats: what generating them cost.
    """

    table: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((4, 0)))
    stats: GenerationStats = dataclasses.field(default_factory=GenerationStats)

    @property
    def done(self) -> int:
        """Prompts whose responses are drawn and scored."""
        return self.table.shape[1]

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"table": self.table, "stats": dataclasses.asdict(self.stats)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "EvaluationSoFar":
        """The inverse."""
        stats = GenerationStats(**{name: int(value) for name, value in state["stats"].items()})
        return cls(np.asarray(state["table"], np.float64), stats)


def plan_calls(
    prompts: Sequence[Prompt], samples: int, pieces: int, piece: int, first: int = 0
) -> list[list[SampleRequest]]:
    """Which samples are drawn in which call.

    Responses are numbered prompt by prompt, sample by sample, and are drawn in that order, from
    number `first` on: calls that were made are a beginning of it.

    Args:
      samples: of each prompt. pieces: requests that fit into a call. piece: samples of one request
        at most; a prompt that asks for more is spread over several.
    """
    requests, at = [], first
    while at < len(prompts) * samples:
        prompt, sample = divmod(at, samples)
        requests.append(
            SampleRequest(prompts[prompt], sample, min(piece - sample % piece, samples - sample))
        )
        at += requests[-1].count
    return [requests[i : i + pieces] for i in range(0, len(requests), pieces)]


def draw_in_calls(
    generator: Generator,
    params: Any,
    calls: Sequence[Sequence[SampleRequest]],
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[Rollouts, GenerationStats]]:
    """For each call: the responses, request after request, and what they cost.

    Calls share one compiled program whatever they hold. The next call is dispatched before a result
    is handed out, so that scoring on the host runs beside generation. Once `stop` says so nothing
    more is dispatched, and what was is still handed out. Randomness is keyed by (prompt's visit,
    sample): how requests are cut into calls changes nothing.
    """
    pending: deque = deque()
    for call in calls:
        if stop():
            break
        pending.append(generator.dispatch(params, call))
        if len(pending) > 1:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def evaluate(
    generator: Generator,
    params: Any,
    prompts: Sequence[Prompt],
    samples: int,
    correct: Callable[[Rollouts], np.ndarray],
    prompts_per_call: int,
    progress: Callable[[int], None] | None = None,
    so_far: EvaluationSoFar | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """`samples` responses to each prompt, scored.

    A prompt's randomness is keyed by its place in `prompts` under the generator's own root key, so
    that two evaluations of one policy agree and two policies are compared on the same
    random numbers.

    Args:
      generator: with room for `prompts_per_call` prompts times `samples`. params: the
        policy's weights.
      correct: rollouts -> bool[R] or f32[R] in {0, 1}. What non-finite logits ended is
        wrong anyway.
      progress: called with the number of prompts done after each call.
      so_far: of the same evaluation, to go on from; kept up to date call by call. stop: asked
        before each call.

    Returns None where `stop` ended it before the last call; `so_far` has what was drawn.
    """
    so_far = EvaluationSoFar() if so_far is None else so_far
    numbered = [dataclasses.replace(prompt, visit=i) for i, prompt in enumerate(prompts)]
    calls = plan_calls(numbered, samples, prompts_per_call, samples, so_far.done * samples)
    for rollouts, more in draw_in_calls(generator, params, calls, stop):
        by_prompt = lambda x: np.asarray(x, np.float64).reshape(-1, samples)
        right = by_prompt(np.where(rollouts.nonfinite, 0, correct(rollouts)))
        surprise = -rollouts.logprobs.sum(1, dtype=np.float64) / np.maximum(rollouts.lengths, 1)
        columns = np.stack(
            [
                right.sum(1),
                *(by_prompt(x).mean(1) for x in (rollouts.lengths, rollouts.truncated, surprise)),
            ]
        )
        so_far.table, so_far.stats = (
            np.concatenate([so_far.table, columns], axis=1),
            so_far.stats + more,
        )
        if progress is not None:
            progress(len(right))
    if so_far.done < len(prompts):
        return None
    table = so_far.table
    return Evaluation(
        samples=samples,
        correct=table[0].astype(np.int64),
        lengths=table[1],
        truncated=table[2],
        entropy=table[3],
        classes=tuple(str(p.meta.get("class", "")) for p in prompts),
        stats=so_far.stats,
    )
