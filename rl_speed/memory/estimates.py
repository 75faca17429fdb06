"""What is known of each prompt's pass rate from earlier visits."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_speed.sampling.rules import Rule
from rl_speed.theory import acceptance


def check_counts(ids: Sequence[str], positive: Sequence[int], total: Sequence[int]) -> None:
    """Raises ValueError where counts are not one for each prompt, or naming the prompt whose counts cannot be."""
    if not len(ids) == len(positive) == len(total):
        raise ValueError(f"one count for each prompt is needed: {len(ids)} ids, {len(positive)} positive, {len(total)} total")
    for i, k, n in zip(ids, positive, total):
        if not 0 <= k <= n:
            raise ValueError(f"prompt {i!r}: {k} right of {n} samples cannot be")


class BetaEma:
    """Decayed counts under a Beta prior: p_hat = (N_pos + a) / (N_total + a + b).

    At each visit of a prompt its own counts are multiplied by `decay` and the new ones added, so that a prompt seldom visited
    keeps what is known of it. Ask before a step, tell after it: the estimate used at a step is then the one from before it.
    Released settings: Beta(1, 16), decay 0.9.

    Source: Reinforce-Ada, section 3.3; methods.md section 3.

    Args:
      a, b: the prior, positive. decay: in (0, 1]; 1 keeps everything.

    Raises ValueError naming the argument that is out of range.
    """

    def __init__(self, a: float = 1.0, b: float = 16.0, decay: float = 0.9):
        for name, value, ok in (("a", a, a > 0), ("b", b, b > 0), ("decay", decay, 0 < decay <= 1)):
            if not ok:
                raise ValueError(f"BetaEma.{name} must be {'in (0, 1]' if name == 'decay' else 'positive'}; got {value!r}")
        self.a, self.b, self.decay = float(a), float(b), float(decay)
        self._counts: dict[str, tuple[float, float]] = {}  # id -> (positive, total)

    def __len__(self) -> int:
        """Prompts that were ever visited."""
        return len(self._counts)

    def estimate(self, ids: Sequence[str]) -> np.ndarray:
        """f64[n] in (0, 1), the posterior means; a / (a + b) for prompts never visited."""
        counts = np.array([self._counts.get(i, (0.0, 0.0)) for i in ids], np.float64).reshape(-1, 2)
        return (counts[:, 0] + self.a) / (counts[:, 1] + self.a + self.b)

    def posterior(self, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(alpha f64[n], beta f64[n]) of the Beta posterior that the counts make of the prior."""
        counts = np.array([self._counts.get(i, (0.0, 0.0)) for i in ids], np.float64).reshape(-1, 2)
        return self.a + counts[:, 0], self.b + counts[:, 1] - counts[:, 0]

    def update(self, ids: Sequence[str], positive: Sequence[int], total: Sequence[int]) -> None:
        """One visit of each prompt: `positive` of `total` samples were right. Prompts without samples are not visited.

        Raises ValueError naming the prompt whose counts cannot be; nothing is changed then.
        """
        check_counts(ids, positive, total)
        for i, k, n in zip(ids, positive, total):
            if n:
                old_k, old_n = self._counts.get(i, (0.0, 0.0))
                self._counts[i] = (self.decay * old_k + float(k), self.decay * old_n + float(n))

    def state_dict(self) -> dict[str, Any]:
        """The counts in the order of first visits; ids as one JSON string, since checkpoints hold no arrays of text."""
        return {"ids": json.dumps(list(self._counts)),
                "counts": np.array(list(self._counts.values()), np.float64).reshape(-1, 2)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken. Prior and decay stay those of this object."""
        counts = np.asarray(state["counts"]).reshape(-1, 2)
        self._counts = {i: (float(k), float(n)) for i, (k, n) in zip(json.loads(state["ids"]), counts)}


def qualifying(rule: Rule) -> Callable[[np.ndarray], np.ndarray]:
    """Pass rates f64[n] -> probability that the rule accepts a prompt after its first samples.

    1 - p^n_init - (1-p)^n_init for SPEED at its strict thresholds 0 and 1, elsewhere the sum over the rule's accepted counts. For
    rules that accept whatever they see, the probability that the first samples have right and wrong ones: that there is
    anything to learn.
    """
    n = rule.first_samples
    first, last = getattr(rule, "accepted_counts", (1, n - 1))
    low, high = (first - 0.5) / n, (last + 0.5) / n  # no count lies on these thresholds
    return lambda p: acceptance(p, n, low, high)
