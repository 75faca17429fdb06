"""The replay cache of RPO (replay of partial reasoning): one response per prompt, a prefix of which
starts the prompt's next samples.

Source: Yi et al., "replay of partial reasoning". `presets.rpo` lists differences between paper and
released code.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.data.prompts import require_same_questions
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
    """Result of `ReplayCache.load`.

    Attributes:
      held: responses in the cache. unknown: responses left out because their prompt is unknown.
      missing: prompts without a response.
      about: the description in the file, such as the policy that sampled the responses.
    """

    held: int
    unknown: int
    missing: int
    about: dict[str, Any]


class ReplayCache:
    """Holds one response per prompt id.

    After every visit, trained on or rejected, a response of its group replaces the one of its
    prompt (Algorithm 1 updates the cache for all prompts). With probability `eps` it is the
    response of highest reward (ties, which the paper leaves open, are broken at random), otherwise
    a uniformly random other response of the group, if there is one. Draws are keyed by (seed, visit
    of the prompt), so they do not depend on the order or number of updates.

    Args:
      eps: in [0, 1]; 0.1 is the paper's best. None: `update` does nothing, as in the released code.
      only_correct: a wrong response never replaces a correct one.
      max_tokens: most tokens of all responses together; None: no bound. Above it, the responses
        that were updated longest ago are evicted and counted.
      seed: keys the draws.
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
        """Returns the cached response to the prompt, or None."""
        return self._held.get(prompt_id)

    def put(self, prompt_id: str, response: CachedResponse) -> None:
        """Stores the response, in place of the prompt's old one. A response longer than
        `max_tokens` is not stored, but counts as evicted; the old one stays.
        """
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
        """Replaces the cached response to the group's prompt by a whole response of the group, as
        the class describes.

        Skips samples without tokens and samples that non-finite logits ended.

        Raises ValueError if the prompt has no visit number (below 0).
        """
        rows = np.flatnonzero((group.lengths > 0) & ~group.nonfinite)
        if self.eps is None or not rows.size:
            return
        if group.prompt.visit < 0:
            raise ValueError(
                f"prompt {group.prompt.id!r} has no visit number, which keys the draws of the "
                "replay cache: take prompts from a prompt stream"
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
        """Counts so far, and means over the cached responses (0 if there are none). Ages are
        measured at policy version `version`.
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
        """Returns the whole state as numbers, strings and NumPy arrays, none of them empty."""
        return {
            "eps": self.eps,
            "only_correct": self.only_correct,
            "seed": self._seed,
            "evicted": self._evicted,
            "kept_right": self._kept_right,
            "responses": pack_responses(self._held),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the contents by a saved state. Keeps this cache's `max_tokens`, and evicts
        responses beyond it.

        Raises ValueError: the saved cache had another eps, only_correct or seed.
        """
        mine = {"eps": self.eps, "only_correct": self.only_correct, "seed": self._seed}
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(
                    f"the saved replay cache has {name} {state[name]!r}, this one {value!r}: "
                    "resume with the settings of the saved run"
                )
        self._replace(
            unpack_responses(state["responses"]), int(state["evicted"]), int(state["kept_right"])
        )

    def save(self, path: str | Path, about: dict[str, Any] | None = None) -> None:
        """Writes the responses to a file that another run can start from; see `save_responses`."""
        save_responses(path, self._held, about or {})

    def load(
        self,
        path: str | Path,
        vocab_size: int | None = None,
        questions: Mapping[str, str] | None = None,
    ) -> CacheReport:
        """Replaces the contents by the responses of a file, sampled by this policy or another
        (appendix C). Keeps their policy versions.

        Args:
          vocab_size: token ids must be below this. questions: `data.prompts.question_digests` of
            the prompts whose responses are kept; None: all.

        Raises: the errors of `load_responses`; ValueError if the file tells other questions under
        these ids. The cache does not change then.
        """
        held, about = load_responses(path, vocab_size)
        if questions is not None:
            asked = {name: digest for name, digest in questions.items() if name in held}
            told = about.get("questions")
            require_same_questions(path, told if isinstance(told, dict) else {}, asked)
        ids = held.keys() if questions is None else set(questions)
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
    """Returns the row of highest reward among samples `rows`; `uniform` in [0, 1) breaks ties."""
    # A NaN reward (of a policy that diverged) is never the highest.
    rewards = np.where(np.isnan(group.rewards[rows]), -np.inf, group.rewards[rows])
    best = rows[rewards == rewards.max()]
    return int(best[int(uniform * len(best))])


def _summed_logprob(group: Rollouts, row: int) -> float:
    # Leaves out padding: NumPy's sum would round differently with other padding.
    return float(group.logprobs[row, : group.lengths[row]].sum(dtype=np.float64))
