"""Budgets from estimated pass rates (Reinforce-Ada-Est): what `Allocated` gives each prompt,
and what its samples then say.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rl_speed import theory
from rl_speed.config import Estimate
from rl_speed.data.prompts import Prompt
from rl_speed.data.rollouts import pack_prompts, unpack_prompts
from rl_speed.rollout.estimators import Estimator
from rl_speed.sampling import Allocated, Rule

# A prompt, how many of its samples were right, how many there were.
Visit = tuple[Prompt, int, int]


def pack_visits(visits: Sequence[Visit]) -> dict[str, Any]:
    """For a checkpoint; the counts i32[2 V] are right, all, right, all, ..."""
    if not visits:
        return {}
    return {
        **pack_prompts([prompt for prompt, _, _ in visits]),
        "counts": np.array([count for visit in visits for count in visit[1:]], np.int32),
    }


def unpack_visits(packed: Mapping[str, Any]) -> list[Visit]:
    """The inverse of `pack_visits`."""
    if not packed:
        return []
    counts = np.asarray(packed["counts"]).reshape(-1, 2).tolist()
    return [
        (prompt, right, drawn)
        for prompt, (right, drawn) in zip(unpack_prompts(packed), counts, strict=True)
    ]


class Allocation(Protocol):
    """What `Screening` asks before a visit, and tells after it."""

    def allocate(
        self, params: Any, prompts: Sequence[Prompt]
    ) -> tuple[np.ndarray, np.ndarray | None]: ...
    def observe(self, params: Any, visits: Sequence[Visit]) -> None: ...
    def metrics(self) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Budgets:
    """Estimates of the prompts that are about to be sampled,
    and their shares of `n` samples a prompt.

    Args:
      estimator: asked before a visit, told after it. rule: budgets are given where it is
        `Allocated`.
      n: samples of a prompt on average. config: how estimates become shares.
    """

    def __init__(self, estimator: Estimator, rule: Rule, n: int, config: Estimate):
        self._estimator = estimator
        self._rule = rule
        self._n = n
        self._config = config

    def allocate(
        self, params: Any, prompts: Sequence[Prompt]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """(estimates f64[P], budgets i64[P] that sum to P x n,
        or None where the rule takes none).
        """
        if not prompts:
            return np.zeros(0), np.zeros(0, np.int64) if isinstance(self._rule, Allocated) else None
        estimates = self._estimator.estimate(params, prompts)
        if not isinstance(self._rule, Allocated):
            return estimates, None
        return estimates, theory.allocate(
            estimates,
            self._n * len(prompts),
            self._config.gamma,
            self._rule.n_min,
            self._rule.n_max,
            self._config.form,
        )

    def observe(self, params: Any, visits: Sequence[Visit]) -> None:
        """What the visits brought, once the rule has decided about their prompts."""
        if visits:
            self._estimator.update(params, *map(list, zip(*visits)))

    def metrics(self) -> dict[str, float]:
        """Those of the estimator."""
        return self._estimator.metrics()

    def state_dict(self) -> dict[str, Any]:
        """The estimator's."""
        return self._estimator.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""
        self._estimator.load_state_dict(state)
