"""Pass rates of prompts from the counts of their own earlier visits."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_speed.data.prompts import Prompt
from rl_speed.estimates.estimator import Account, check_counts


class BetaEma:
    """Estimates pass rates from decayed counts under a Beta prior: p_hat = (N_pos + a) /
    (N_total + a + b).

    At each visit of a prompt, its counts are multiplied by `decay` and the new counts are added.
    Between visits they do not change. Released settings: Beta(1, 16), decay 0.9.

    Source: Reinforce-Ada, section 3.1.

    Args:
      a, b: the Beta prior, positive. decay: in (0, 1].

    Raises ValueError naming the argument that is out of range.
    """

    def __init__(self, a: float = 1.0, b: float = 16.0, decay: float = 0.9):
        for name, value, ok in (("a", a, a > 0), ("b", b, b > 0), ("decay", decay, 0 < decay <= 1)):
            if not ok:
                raise ValueError(
                    f"BetaEma.{name} must be "
                    f"{'in (0, 1]' if name == 'decay' else 'positive'}; got {value!r}"
                )
        self.a = float(a)
        self.b = float(b)
        self.decay = float(decay)
        self._counts: dict[str, tuple[float, float]] = {}  # id -> (correct, total)

    def __len__(self) -> int:
        """Number of prompts with at least one visit."""
        return len(self._counts)

    def estimate(self, ids: Sequence[str]) -> np.ndarray:
        """Returns the posterior means, f64[n] in (0, 1); a / (a + b) for prompts never visited."""
        counts = np.array([self._counts.get(i, (0.0, 0.0)) for i in ids], np.float64).reshape(-1, 2)
        return (counts[:, 0] + self.a) / (counts[:, 1] + self.a + self.b)

    def update(self, ids: Sequence[str], correct: Sequence[int], total: Sequence[int]) -> None:
        """Counts a visit of each prompt: `correct` of `total` samples were correct. Ignores prompts
        with `total` 0.

        Raises ValueError naming a prompt with impossible counts; no count changes then.
        """
        check_counts(ids, correct, total)
        for i, k, n in zip(ids, correct, total):
            if n:
                old_k, old_n = self._counts.get(i, (0.0, 0.0))
                self._counts[i] = (self.decay * old_k + float(k), self.decay * old_n + float(n))

    def state_dict(self) -> dict[str, Any]:
        """Returns the counts in the order of first visits. Ids are one JSON string, because
        checkpoints cannot store arrays of text.
        """
        return {
            "ids": json.dumps(list(self._counts)),
            "counts": np.array(list(self._counts.values()), np.float64).reshape(-1, 2),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts. Keeps the prior and decay of this object."""
        counts = np.asarray(state["counts"]).reshape(-1, 2)
        self._counts = {
            i: (float(k), float(n)) for i, (k, n) in zip(json.loads(state["ids"]), counts)
        }


class EmaEstimator:
    """Estimator of pass rates by prompt id, with `BetaEma`. Does not use the policy's weights.

    Its calibration compares new counts with the estimates just before they are added.
    """

    def __init__(self, memory: BetaEma):
        self.memory = memory
        self._account = Account()

    def estimate(self, params: Any, prompts: Sequence[Prompt]) -> np.ndarray:
        """Returns the posterior means, f64[n]."""
        with self._account.timed():
            return self.memory.estimate([p.id for p in prompts])

    def update(
        self, params: Any, prompts: Sequence[Prompt], correct: Sequence[int], total: Sequence[int]
    ) -> None:
        """Counts one visit of each prompt; see `BetaEma.update`."""
        with self._account.timed():
            ids = [p.id for p in prompts]
            before = self.memory.estimate(ids)
            self.memory.update(ids, correct, total)
            self._account.see(before, correct, total)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of `Estimator`, and the number of prompts with counts."""
        return {**self._account.metrics(), "estimate/known": float(len(self.memory))}

    def state_dict(self) -> dict[str, Any]:
        """See `Estimator`."""
        return {"memory": self.memory.state_dict(), "account": self._account.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts, and the sums behind the metrics, that `state_dict` returned."""
        self.memory.load_state_dict(state["memory"])
        self._account.load_state_dict(state["account"])
