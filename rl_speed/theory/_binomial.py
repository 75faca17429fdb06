"""The binomial distribution of counts of positives."""

import numpy as np


def coefficients(n: int) -> np.ndarray:
    """C(n, 0..n), float64 [n + 1], each correctly rounded.

    Raises OverflowError for n above 1029.
    """
    row = [1]
    for i in range(n):
        row.append(row[-1] * (n - i) // (i + 1))
    return np.array([float(c) for c in row])


def pmf(p: np.ndarray, n: int) -> np.ndarray:
    """Probabilities of 0..n positives among n samples of pass rate(s) p, float64 [..., n + 1]."""
    k = np.arange(n + 1)
    p = p[..., None]
    return coefficients(n) * p**k * (1 - p) ** (n - k)
