"""The distribution that all counts of positives follow."""

import math

import numpy as np


def pmf(p: np.ndarray, n: int) -> np.ndarray:
    """Probabilities of 0..n positives among n samples of pass rate(s) p, float64 [..., n + 1]."""
    k = np.arange(n + 1)
    comb = np.array([math.comb(n, i) for i in range(n + 1)], np.float64)
    p = p[..., None]
    return comb * p**k * (1 - p) ** (n - k)
