"""What becomes of prompts, however a step is made: their fates, the acceptance,
estimates and budgets, replayed responses.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rl_speed.data.prompts import Prompt, PromptStream
from rl_speed.data.rollouts import Rollouts
from rl_speed.replay.cuts import Replay
from rl_speed.replay.responses import CachedResponse
from rl_speed.replay.source import PrefixSource
from rl_speed.rollout.budgets import Allocation, Visit
from rl_speed.rollout.prompt_counts import FORGET, PromptCounts, load_counts


class Screening:
    """The part of a step's state that does not depend on where the rule is asked.

    Args:
      stream: prompts come from it, and it is told what became of them. budgets: estimates of pass
        rates, and how many samples each prompt gets for them; None: nobody estimates. prefixes:
        where samples start; None: at the prompt.

    Attributes:
      tally: prompts by fate.
      news: visits that were decided since the estimates were told, as `Visit`; empty where
        nobody estimates.
    """

    def __init__(
        self,
        stream: PromptStream,
        budgets: Allocation | None = None,
        prefixes: PrefixSource | None = None,
    ):
        self.stream = stream
        self.budgets = budgets
        self.prefixes = prefixes
        self.prompt_counts = PromptCounts()
        self.news: list[Visit] = []
        # Acceptance so far, exponentially forgotten. It starts at one: a rule that refuses nothing
        # is then never given more prompts than it needs, and one that does learns its rate from the
        # first call.
        self._accepted = 1.0
        self._decided = 1.0

    @property
    def acceptance(self) -> float:
        """Estimated share of screened prompts that the rule accepts, the latest weighing most."""
        return self._accepted / self._decided

    def judged(self, passed: Iterable[bool]) -> None:
        """Prompts whose screening is over, one after the other: whether the rule accepted each."""
        for accepted in passed:
            self._accepted = FORGET * self._accepted + accepted
            self._decided = FORGET * self._decided + 1.0

    def allocate(
        self, params: Any, prompts: Sequence[Prompt]
    ) -> tuple[np.ndarray, np.ndarray | None] | None:
        """(estimates f64[P], budgets i64[P] or None) of prompts about to be visited;
        None where nobody estimates.
        """
        return None if self.budgets is None else self.budgets.allocate(params, prompts)

    def observe(
        self,
        prompts: Sequence[Prompt],
        right: Sequence[int],
        drawn: Sequence[int],
        tokens: Sequence[float],
    ) -> None:
        """What became of prompts that are done with: the stream is told,
        and those who estimate pass rates with the next `tell_estimates`.
        `tokens`: sampled ones, the mean over a prompt's samples.
        """
        self.stream.observe(prompts, right, drawn, tokens)
        if self.budgets is not None:
            self.news += zip(prompts, right, drawn)

    def remember(self, groups: Iterable[Rollouts]) -> None:
        """Let the replay cache have the samples of visits that are over, trained on or rejected."""
        if self.prefixes is not None:
            self.prefixes.remember(groups)

    def tell_estimates(self, params: Any) -> None:
        """Let the estimates have the news."""
        if self.budgets is not None:
            self.budgets.observe(params, self.news)
        self.news = []

    def cached(self, prompt: Prompt) -> CachedResponse | None:
        """The response that samples of this visit start inside of, if there is one."""
        return None if self.prefixes is None else self.prefixes.cache.get(prompt.id)

    def replay(
        self, cached: CachedResponse | None, prompt: Prompt, first: int, count: int
    ) -> Replay | None:
        """Where samples `first` to `first + count - 1` of a visit start, unless at the prompt."""
        return None if cached is None else self.prefixes.replay(cached, prompt.visit, first, count)

    def metrics(self, version: int) -> dict[str, float]:
        """Those of the estimates and of the replay cache."""
        return {
            **({} if self.budgets is None else self.budgets.metrics()),
            **({} if self.prefixes is None else self.prefixes.cache.metrics(version)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Without the news, which are none between two steps, and without the stream,
        which saves itself.
        """
        return {
            "tally": dataclasses.asdict(self.prompt_counts),
            "accepted": self._accepted,
            "decided": self._decided,
            **({} if self.budgets is None else {"estimates": self.budgets.state_dict()}),
            **({} if self.prefixes is None else {"replay": self.prefixes.cache.state_dict()}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; other entries of it are not looked at."""
        self.prompt_counts = load_counts(state["tally"])
        self.news = []
        self._accepted = float(state["accepted"])
        self._decided = float(state["decided"])
        if self.budgets is not None and "estimates" in state:
            self.budgets.load_state_dict(state["estimates"])
        if self.prefixes is not None and "replay" in state:
            self.prefixes.cache.load_state_dict(state["replay"])
