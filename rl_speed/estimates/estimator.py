"""The interface of pass-rate estimators, and what they share.

An `Estimator` estimates before a step's samples are drawn and is updated after: a step uses the
estimate from before it.

Source: Reinforce-Ada (Xiong et al.), section 3.1.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rl_speed.data.prompts import Prompt


class Estimator(Protocol):
    """Interface of pass-rate estimators, as the host driver uses them."""

    def estimate(self, params: Any, prompts: Sequence[Prompt]) -> np.ndarray:
        """f64[n] in (0, 1). `params`: the policy's weights, as the trainer holds them."""

    def update(
        self, params: Any, prompts: Sequence[Prompt], correct: Sequence[int], total: Sequence[int]
    ) -> None:
        """Learns that `correct` of `total` samples of each prompt were correct.

        Raises ValueError naming a prompt with impossible counts.
        """

    def metrics(self) -> dict[str, float]:
        """Metrics of `calibration` at the latest update, and the seconds spent so far under a key
        that begins with "time/".
        """

    def state_dict(self) -> dict[str, Any]:
        """Nested dicts of JSON values and NumPy arrays."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state."""


def calibration(
    estimates: np.ndarray, correct: Sequence[int], total: Sequence[int]
) -> dict[str, float]:
    """Compares estimates with the counts of the visit that followed, as means over samples.

    Args:
      estimates: f64[n] in (0, 1). correct, total: counts of each prompt.

    Returns:
      bce: -log of the probability given to each sample's outcome, in nats. bce_constant: bce of the
        best constant in hindsight (the entropy of the pooled pass rate); a useful estimator is
        below it. brier: (estimate - reward)^2. mean: of the estimates. pass_rate: of the samples;
        `mean` should be near it. Empty if there are no samples.
    """
    k = np.asarray(correct, np.float64)
    n = np.asarray(total, np.float64)
    if not (samples := float(n.sum())):
        return {}
    rate = float(k.sum()) / samples

    def cost(p):
        return -float(k @ np.log(p) + (n - k) @ np.log1p(-p)) / samples

    return {
        "bce": cost(estimates),
        "bce_constant": cost(np.full(len(n), rate)) if 0 < rate < 1 else 0.0,
        "brier": float(k @ (1 - estimates) ** 2 + (n - k) @ estimates**2) / samples,
        "mean": float(n @ estimates) / samples,
        "pass_rate": rate,
    }


class Account:
    """Seconds spent and the latest calibration."""

    def __init__(self):
        self.seconds = 0.0
        self.latest = {}

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin

    def see(self, estimates, correct, total) -> None:
        self.latest = calibration(estimates, correct, total) or self.latest

    def metrics(self) -> dict[str, float]:
        return {
            **{f"estimate/{name}": x for name, x in self.latest.items()},
            "time/estimate_total": self.seconds,
        }

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "latest": dict(self.latest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds = float(state["seconds"])
        self.latest = {name: float(x) for name, x in state["latest"].items()}


def check_counts(ids: Sequence[str], correct: Sequence[int], total: Sequence[int]) -> None:
    """Checks that each prompt has one count.

    Raises ValueError if it has not, or naming a prompt with impossible counts.
    """
    if not len(ids) == len(correct) == len(total):
        raise ValueError(
            f"one count for each prompt is needed: {len(ids)} ids, {len(correct)} correct, "
            f"{len(total)} total"
        )
    for i, k, n in zip(ids, correct, total):
        if not 0 <= k <= n:
            raise ValueError(f"prompt {i!r}: {k} correct of {n} samples is impossible")
