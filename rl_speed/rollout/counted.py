"""Pass rates of prompts, counted at earlier visits."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np


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


class BetaEma:
    """Decayed counts under a Beta prior: p_hat = (N_pos + a) / (N_total + a + b).

    At each visit of a prompt its own counts are multiplied by `decay` and the new ones added. A
    prompt that is seldom visited keeps its counts. Estimate before a step and update after it: a
    step then uses the estimate from before it. Released settings: Beta(1, 16), decay 0.9.

    Source: Reinforce-Ada, section 3.1; methods.md section 3.

    Args:
      a, b: the prior, positive. decay: in (0, 1]; 1 keeps everything.

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
        """Number of prompts that were ever visited."""
        return len(self._counts)

    def estimate(self, ids: Sequence[str]) -> np.ndarray:
        """f64[n] in (0, 1), the posterior means; a / (a + b) for prompts never visited."""
        counts = np.array([self._counts.get(i, (0.0, 0.0)) for i in ids], np.float64).reshape(-1, 2)
        return (counts[:, 0] + self.a) / (counts[:, 1] + self.a + self.b)

    def visited(self, ids: Sequence[str]) -> np.ndarray:
        """bool[n]: whether the prompt has counts."""
        return np.array([i in self._counts for i in ids], bool)

    def update(self, ids: Sequence[str], correct: Sequence[int], total: Sequence[int]) -> None:
        """Counts one visit of each prompt: `correct` of `total` samples were correct.

        Prompts without samples are not visited.

        Raises ValueError naming a prompt with impossible counts; nothing is changed then.
        """
        check_counts(ids, correct, total)
        for i, k, n in zip(ids, correct, total):
            if n:
                old_k, old_n = self._counts.get(i, (0.0, 0.0))
                self._counts[i] = (self.decay * old_k + float(k), self.decay * old_n + float(n))

    def state_dict(self) -> dict[str, Any]:
        """The counts in the order of first visits. Ids are one JSON string, because checkpoints
        hold no text arrays.
        """
        return {
            "ids": json.dumps(list(self._counts)),
            "counts": np.array(list(self._counts.values()), np.float64).reshape(-1, 2),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the counts. Prior and decay stay those of this object."""
        counts = np.asarray(state["counts"]).reshape(-1, 2)
        self._counts = {
            i: (float(k), float(n)) for i, (k, n) in zip(json.loads(state["ids"]), counts)
        }
