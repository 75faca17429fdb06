"""The replay cache of RPO (replay of partial reasoning): one response per prompt, from which its
next samples start.

Source: Yi et al., "replay of partial reasoning". `presets.rpo` lists differences between paper and
released code.
"""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.data.rollouts import Rollouts
from rl_speed.replay.responses import (
    CachedResponse,
    load_responses,
    pack_responses,
    save_responses,
    unpack_responses,
)

# RNG stream id of updates with (seed, visit). Not 0: NumPy pads seeds with zeros.
_UPDATE = 1


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """Result of loading a file.

    Attributes:
      held: responses in the cache. unknown: responses left out, since their prompt is not known.
      missing: prompts without a response. about: what the file says of itself, such as whose
        responses it has.
    """

    held: int
    unknown: int
    missing: int
    about: dict[str, Any]


class ReplayCache:
    """Holds one response per prompt id.

    After every visit, trained on or rejected, one response of its group may replace that of its
    prompt (Algorithm 1 updates the cache for all prompts).

    With probability `eps` it is the response of highest reward, with random ties; otherwise a
    uniformly random other one. A group of one has no other. The paper leaves ties open, and nearly
    every group has them if rewards are 0 or 1. Breaking them by log-prob would favour short
    suffixes. Draws are keyed by (seed, visit of the prompt): they do not depend on the order or the
    number of updates.

    Args:
      eps: in [0, 1]; 0.1 is the paper's best. None never updates, as released: the 0.5 in that code
        is never reached.
      only_correct: a wrong response never replaces a correct one.
      max_tokens: bound on the tokens held, None for none. Beyond it the responses that were updated
        longest ago are evicted and counted.
    """

    def __init__(
        self,
        eps: float | None = 0.1,
        only_correct: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
    ):
        self.eps = eps
        self.only_correct = only_correct
        self.max_tokens = max_tokens
        self._seed = seed
        self._held: dict[str, CachedResponse] = {}  # updated longest ago first
        self.tokens = 0  # held, over all responses
        self._evicted = 0
        self._kept_right = 0

    def __len__(self) -> int:
        """Number of prompts with a response."""
        return len(self._held)

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._held

    def get(self, prompt_id: str) -> CachedResponse | None:
        """The cached response, or None."""
        return self._held.get(prompt_id)

    def put(self, prompt_id: str, response: CachedResponse) -> None:
        """Stores this response; one longer than the whole bound only counts as evicted."""
        if self.max_tokens is not None and len(response.tokens) > self.max_tokens:
            self._evicted += 1
            return
        self._remove(prompt_id)
        self._held[prompt_id] = response
        self.tokens += len(response.tokens)
        while self.max_tokens is not None and self.tokens > self.max_tokens:
            self._remove(next(iter(self._held)))
            self._evicted += 1

    def update(self, group: Rollouts) -> None:
        """May replace the response to the group's prompt by one of the group's, with its prefix.

        Skips samples without tokens, and those that non-finite logits ended. Raises ValueError if
        the prompt never left a stream (visit below 0).
        """
        rows = np.flatnonzero((group.lengths > 0) & ~group.nonfinite)
        if self.eps is None or not rows.size:
            return
        if group.prompt.visit < 0:
            raise ValueError(
                f"prompt {group.prompt.id!r} has no visit: the draws of the "
                "replay cache are keyed by it"
            )
        take_best, uniform, other = np.random.default_rng(
            [self._seed, group.prompt.visit, _UPDATE]
        ).random(3)
        best = row = best_sample(group, rows, uniform)
        if take_best >= self.eps and len(rows) > 1:
            others = rows[rows != best]
            row = int(others[int(other * len(others))])
        held = self.get(group.prompt.id)
        length = group.lengths[row]
        if self.only_correct and held is not None and held.correct and not group.correct[row]:
            self._kept_right += 1
            return
        self.put(
            group.prompt.id,
            CachedResponse(
                tokens=group.tokens[row, :length],
                version=int(group.versions[row]),
                reward=float(group.rewards[row]),
                correct=bool(group.correct[row]),
                truncated=bool(group.truncated[row]),
                logprob=_summed_logprob(group, row),
                shortest=int(group.lengths[rows].min()),
            ),
        )

    def metrics(self, version: int) -> dict[str, float]:
        """Counts so far, and means over the responses held (0 when empty), their ages at policy
        version `version`.
        """
        held = list(self._held.values())

        def mean(values):
            return float(np.mean(values)) if held else 0.0

        return {
            "replay/size": float(len(held)),
            "replay/tokens": float(self.tokens),
            "replay/evicted": float(self._evicted),
            "replay/kept_right": float(self._kept_right),
            "replay/age_mean": mean([version - r.version for r in held]),
            "replay/correct": mean([r.correct for r in held]),
            "replay/length": mean([len(r.tokens) for r in held]),
        }

    def state_dict(self) -> dict[str, Any]:
        """The whole state: numbers, strings and (never empty) NumPy arrays."""
        return {
            "eps": self.eps,
            "only_correct": self.only_correct,
            "seed": self._seed,
            "evicted": self._evicted,
            "kept_right": self._kept_right,
            "responses": pack_responses(self._held),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the contents. This cache's bound stays: excess responses are evicted.

        Raises:
          ValueError: the saved cache had another eps, only_correct or seed, so the next updates
            would differ.
        """
        mine = {"eps": self.eps, "only_correct": self.only_correct, "seed": self._seed}
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(
                    f"the saved replay cache has {name} {state[name]!r}, this one {value!r}"
                )
        self._replace(
            unpack_responses(state["responses"]), int(state["evicted"]), int(state["kept_right"])
        )

    def save(self, path: str | Path, about: dict[str, Any] | None = None) -> None:
        """Writes the responses for another run to start from; see `save_responses`."""
        save_responses(path, self._held, about or {})

    def load(
        self,
        path: str | Path,
        vocab_size: int | None = None,
        prompt_ids: Collection[str] | None = None,
    ) -> CacheReport:
        """Replaces the contents by those of a file, with its versions, from this policy or another
        one (appendix C).

        Args:
          vocab_size: bound on token ids. prompt_ids: the known prompts; None: any.

        Raises: the errors of `load_responses`; nothing is changed then.
        """
        held, about = load_responses(path, vocab_size)
        ids = held.keys() if prompt_ids is None else set(prompt_ids)
        known = {name: response for name, response in held.items() if name in ids}
        self._replace(known, 0, 0)
        missing = len(ids - self._held.keys())
        return CacheReport(
            held=len(self), unknown=len(held) - len(known), missing=missing, about=about
        )

    def _replace(self, held: dict[str, CachedResponse], evicted: int, kept_right: int) -> None:
        self._held = {}
        self.tokens = 0
        self._evicted = evicted
        self._kept_right = kept_right
        for name, response in held.items():
            self.put(name, response)

    def _remove(self, prompt_id: str) -> None:
        if (old := self._held.pop(prompt_id, None)) is not None:
            self.tokens -= len(old.tokens)


def best_sample(group: Rollouts, rows: np.ndarray, uniform: float) -> int:
    """Row of highest reward among samples `rows`; `uniform` in [0, 1) breaks ties."""
    # NaN rewards, of a policy that diverged, are never the highest.
    rewards = np.where(np.isnan(group.rewards[rows]), -np.inf, group.rewards[rows])
    best = rows[rewards == rewards.max()]
    return int(best[int(uniform * len(best))])


def _summed_logprob(group: Rollouts, row: int) -> float:
    # Sums only the response's own tokens: with other padding NumPy's sum would round differently.
    return float(group.logprobs[row, : group.lengths[row]].sum(dtype=np.float64))
