"""The interface of pass-rate estimators, and code that they share.

An estimator estimates before the samples of a step are drawn, and is updated after the step.

Source: Reinforce-Ada (Xiong et al.), section 3.1.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from rl_speed.data.prompts import Prompt


class Estimator(Protocol):
    """Interface of pass-rate estimators."""

    def estimate(self, params: Any, prompts: Sequence[Prompt]) -> np.ndarray:
        """Returns the estimated pass rates, f64[n] in (0, 1). `params`: the policy's weights, as
        the trainer holds them.
        """

    def update(
        self, params: Any, prompts: Sequence[Prompt], correct: Sequence[int], total: Sequence[int]
    ) -> None:
        """Learns from a visit of each prompt: `correct` of `total` samples were correct.

        Raises ValueError naming a prompt with impossible counts.
        """

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `calibration` at the latest update, and the seconds spent so far
        under a key that begins with "time/".
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as nested dicts of JSON values and NumPy arrays."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state."""


def calibration(
    estimates: np.ndarray, correct: Sequence[int], total: Sequence[int]
) -> dict[str, float]:
    """Compares estimates with the counts of the visits that followed.

    Args:
      estimates: f64[n] in (0, 1). correct, total: counts of each prompt.

    Returns: means over samples; an empty dict if there are none.
      bce: binary cross-entropy of the estimates, in nats.
      bce_constant: bce of the best constant estimate, known only afterwards (the entropy of the
        pooled pass rate). A useful estimator has a lower bce.
      brier: (estimate - correct)^2, with correct 0 or 1.
      mean: of the estimates. pass_rate: of the samples. The two should be close.
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
    """Keeps the seconds that an estimator has spent, and its latest calibration."""

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
    """Raises ValueError if the lengths differ, or naming a prompt whose counts are impossible."""
    if not len(ids) == len(correct) == len(total):
        raise ValueError(
            "one count for each prompt is needed, so ids, correct and total must have one length; "
            f"got {len(ids)}, {len(correct)} and {len(total)}"
        )
    for i, k, n in zip(ids, correct, total):
        if not 0 <= k <= n:
            raise ValueError(
                f"prompt {i!r}: {k} correct of {n} samples is impossible; correct must be in "
                f"[0, {n}]"
            )
