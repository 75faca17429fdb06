"""The best number of screening samples for a prompt whose pass rate has a Beta belief: none if the
belief is certain enough.

A group of n samples has the value n p^c (1-p), its signal about the gradient of p^c / c, unless its
rewards are all equal; then it has none. With c = 1 that is n p (1-p), the signal of SPEED's theorem
3.1 (arXiv 2506.09016). With c = 0, the signal of log p, rarely solved prompts have the highest
value. Rejected prompts cost their screening samples and gain nothing.
"""

from collections.abc import Sequence

import numpy as np
from scipy import special

from rl_speed.theory import _check


def group_value(a, b, n: int, n_init: int, power: float = 1.0):
    """(worth, samples) expected of one prompt whose pass rate is Beta(a, b).

    It is screened with `n_init` samples and gets the rest of `n` if these are not all alike. With
    n_init = n all are drawn at once, and have value if they are not all alike.

      worth = n v(a, b) (1 - P(all wrong) - P(all correct)),  for m = n_init samples of a prompt
      whose pass rate is Beta(a + c, b + 1), the belief weighted by worth,
      v(a, b) = E[p^c (1-p)] = B(a + c, b + 1) / B(a, b)

    Args:
      a, b: f64, positive, of any shapes that broadcast. n: samples of a whole group, at least 2.
        n_init: 2 to n. power: c, in [0, 1].

    Returns: two f64 of the broadcast shape.
    Raises: ValueError or TypeError for an argument out of these ranges.
    Source: ours; with a point as belief it is SPEED's screening.
    """
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    if not (np.all(a > 0) and np.all(b > 0) and np.all(np.isfinite(a + b))):
        raise ValueError(f"a and b must be positive and finite; got {a!r}, {b!r}")
    if not 0 <= power <= 1:
        raise ValueError(f"power must be in [0, 1]; got {power!r}")
    n = _check.count(n, "n", 2)
    m = _check.count(n_init, "n_init", 2)
    if m > n:
        raise ValueError(f"n_init must be at most n = {n}; got {m}")
    worth = b * special.poch(a, power) / special.poch(a + b, power + 1)
    differ = _not_alike(a + power, b + 1, m)
    return (n * worth * differ)[()], (m + (n - m) * _not_alike(a, b, m))[()]


def best_screening(a, b, n: int, choices: Sequence[int], power: float = 1.0):
    """(n_init, worth of a sample): the choice with the largest worth / samples.

    Args: as `group_value`; among equal choices the first is taken.

    Returns: i64 and f64 of the broadcast shape.
    """
    choices = list(choices)
    rates = []
    for m in choices:
        worth, samples = group_value(a, b, n, m, power)
        rates.append(worth / samples)
    rates = np.stack(np.broadcast_arrays(*rates))
    best = np.argmax(rates, axis=0)
    return np.asarray(choices, np.int64)[best], np.take_along_axis(rates, best[None], axis=0)[0]


def _not_alike(a, b, m: int):
    """Probability that m samples are neither all wrong nor all correct."""
    j = np.arange(m).reshape(-1, *[1] * np.ndim(a))

    def all_of(some):
        return np.prod((some + j) / (a + b + j), axis=0)

    return 1 - all_of(a) - all_of(b)
