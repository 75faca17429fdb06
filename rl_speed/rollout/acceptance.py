"""How probable it is that a rule accepts a prompt: the probability at a pass rate,
and what was counted.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_speed.rollout.counted import BetaEma
from rl_speed.sampling.rules import Rule
from rl_speed.theory import acceptance

# Prompts whose estimated pass rate lies between the same two of these are alike.
EDGES = np.array([0.01, 0.03, 0.06, 0.12, 0.3, 0.7, 0.88, 0.94, 0.97, 0.99])
# What is remembered of a class at each further visit of one of its prompts: 500 visits.
FORGET = 0.998
# What the estimates say of a class before anything is counted, in visits.
WEIGHT = 2.0


def _accepted_counts(rule: Rule) -> tuple[int, int]:
    """Of the first samples, the smallest and largest number of right ones that qualify.

    For rules that accept whatever they see, those with right and wrong ones: there is
    something to learn.
    """
    return getattr(rule, "accepted_counts", (1, rule.first_samples - 1))


def qualifying(rule: Rule) -> Callable[[np.ndarray], np.ndarray]:
    """Pass rates f64[n] -> probability that the rule accepts a prompt after its first samples.

    1 - p^n_init - (1-p)^n_init for SPEED at its strict thresholds 0 and 1, elsewhere the sum over
    the rule's accepted counts.
    """
    n, (first, last) = rule.first_samples, _accepted_counts(rule)
    low, high = (first - 0.5) / n, (last + 0.5) / n  # no count lies on these thresholds
    return lambda p: acceptance(p, n, low, high)


def qualified(rule: Rule, positive: Sequence[int], total: Sequence[int]) -> np.ndarray:
    """bool[n]: whether prompts with `positive` of `total` samples right qualified.

    What has more than the first samples did, where the rule refuses others; where it refuses none,
    what has right and wrong ones.
    """
    positive, total = np.asarray(positive, np.int64), np.asarray(total, np.int64)
    if not hasattr(rule, "accepted_counts"):
        return (positive > 0) & (positive < total)
    first, last = rule.accepted_counts
    return (total > rule.first_samples) | ((first <= positive) & (positive <= last))


class Acceptance:
    """The share that qualified of the prompts that looked alike when they were last seen.

    Prompts are alike whose estimates lie between the same two of `EDGES`; those never visited are a
    class of their own. Of each class it is counted how many of its prompts qualified at their next
    visit, old visits being forgotten (`FORGET`). So nothing has to be assumed of how pass rates are
    distributed, or of how training changes them: that four wrong of four mean hopeless, and four
    right of four soon another wrong one, shows in the counts. Before there are any, a class counts
    `WEIGHT` visits with the acceptance at the middle of its estimates. Not from a paper.

    Args:
      rule: says what qualifies. estimates: of the pass rates, this object's own.
    """

    def __init__(self, rule: Rule, estimates: BetaEma):
        self._rule, self._estimates = rule, estimates
        edges = np.concatenate([[0.0], EDGES, [1.0]])
        middle = np.concatenate(
            [[estimates.a / (estimates.a + estimates.b)], (edges[1:] + edges[:-1]) / 2]
        )
        # Between 0 and 1, so that the draws are of a Beta distribution even where a rule refuses
        # all or none.
        share = np.clip(qualifying(rule)(middle), 0.01, 0.99)
        self._prior = WEIGHT * np.stack([share, 1 - share])
        # Of each class, visits that qualified and visits that did not.
        self._counts = np.zeros_like(self._prior)

    def look(self, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """(f64[n], the posterior mean pass rates; i64[n], the classes,
        0 for prompts never visited).
        """
        estimate = self._estimates.estimate(ids)
        return estimate, np.where(
            self._estimates.visited(ids), 1 + np.searchsorted(EDGES, estimate), 0
        )

    def draw(self, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """f64[n], for each prompt a draw from the Beta posterior of its class's acceptance."""
        return rng.beta(*(self._prior + self._counts)[:, classes])

    def update(self, ids: Sequence[str], positive: Sequence[int], total: Sequence[int]) -> None:
        """One visit of each prompt; those without samples are not visited.

        Raises ValueError naming the prompt whose counts cannot be; nothing is changed then.
        """
        classes = self.look(ids)[1]
        self._estimates.update(ids, positive, total)
        visited = np.asarray(total) > 0
        good = qualified(self._rule, positive, total) & visited
        count = lambda rows: np.bincount(classes[rows], minlength=len(self._prior[0])).astype(
            np.float64
        )
        self._counts = self._counts * FORGET ** count(visited) + np.stack(
            [count(good), count(visited & ~good)]
        )

    def state_dict(self) -> dict[str, Any]:
        """The counts f64[2, classes], and those of the prompts ever observed."""
        return {"counts": self._counts.copy(), "estimates": self._estimates.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken."""
        self._counts = np.array(state["counts"], np.float64)
        self._estimates.load_state_dict(state["estimates"])
