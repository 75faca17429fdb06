"""Signal-to-noise ratio of one group's policy gradient (SPEED, section 3).

SNR = |E g|^2 / E|g - E g|^2 for the gradient estimate g of one prompt with
pass rate p. It vanishes at p = 0 and p = 1: such prompts cost samples and teach
nothing.
"""

import numpy as np

from rl_speed.theory import _check


def snr_bound(p, n: int):
    """Upper bound on the SNR of the RLOO gradient from n samples.

    [ 1/(n p(1-p)) + (n-2)(n-3)/(n(n-1)) - 1 ]^-1.

    The one-logit Bernoulli policy attains it: there g is the sample variance of
    the n rewards.

    Args:
      p: pass rate(s) in [0, 1], any shape.
      n: samples per prompt, at least 2.

    Returns: float64 of p's shape; 0 at p in {0, 1}.

    Raises: ValueError for p outside [0, 1] or n < 2.

    Source: arXiv 2506.09016, theorem 3.1.
    """
    p = _check.probability(p)
    n = _check.count(n, "n", 2)
    spread = p * (1 - p)
    # x / (1 + c x) is [1/x + c]^-1 without the division by zero at x = 0. The
    # second term is (n-2)(n-3)/(n(n-1)) - 1 in one fraction.
    x = n * spread
    return (x / (1 - x * (4 * n - 6) / (n * (n - 1))))[()]


def snr_bound_simple(p, n: int):
    """4 n p(1-p): the readable bound, for n >= 3 and p outside [1/4, 3/4] only.

    Returns NaN where p lies inside [1/4, 3/4]: nothing is claimed there.
    Raises: ValueError for p outside [0, 1] or n < 3. Source: as `snr_bound`.
    """
    p = _check.probability(p)
    n = _check.count(n, "n", 3)
    return np.where((p < 0.25) | (p > 0.75), 4 * n * p * (1 - p), np.nan)[()]


def snr_bound_exact_advantage(p):
    """SNR bound of one sample whose advantage r - p is known exactly.

    [ (1-p)^2/p + p^2/(1-p) - 1 ]^-1 = p(1-p) / (1 - 4 p(1-p)) = p(1-p) / (1-2p)^2;
    infinite at p = 1/2, where the gradient of a one-logit policy has no variance.
    Source: methods.md section 1.
    """
    p = _check.probability(p)
    with np.errstate(divide="ignore"):
        return (p * (1 - p) / np.square(1 - 2 * p))[()]
