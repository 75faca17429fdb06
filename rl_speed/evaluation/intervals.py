"""95% confidence intervals of pass@k, of two kinds.

An evaluation draws n responses to each of Q questions. The interval depends on what is random:

- *same questions, other responses*: the benchmark is fixed, and only the sampling of responses is
  random. Use it to compare checkpoints on one benchmark. It shrinks with n.
- *other questions like these*: the questions are a random sample, too. Use it for the policy's
  ability in general. The responses to a question then form a cluster, and the interval shrinks only
  with Q (Miller, 'Adding Error Bars to Evals', arXiv 2411.00640).

Each kind estimates its variance V, and then computes Agresti and Coull's interval (1998). In place
of a count it uses the number of independent trials with this variance, m (1 - m) / V at the mean m
(as for cluster surveys: Korn and Graubard 1998; Dean and Pagano 2015). So an interval stays inside
[0, 1], is asymmetric near 0 and 1, and never has zero width: the number of trials has a theoretical
lower bound, and V treats no question's pass rate as exactly 0 or 1 (`sampling_variance`). The
computation is deterministic.

Coverage on simulated benchmarks is tested (tests/evaluation/test_evaluation_intervals.py). It is
near 0.95, and higher where results hardly vary. It falls to 0.9, and at worst near 0.8, in two
cases: k is nearly n, or there are a few dozen questions and the result depends on the few that are
sometimes solved.
"""

import functools

import numpy as np
from scipy import special, stats

Z = float(special.ndtri(0.975))
# Grid of pass rates for estimated distributions, both ends included, denser near the ends.
RATES = np.sin(np.linspace(0, np.pi / 2, 61)) ** 2


@functools.lru_cache
def failure(n: int, k: int) -> np.ndarray:
    """Share of k-subsets of n responses without a correct one, for c = 0..n correct responses,
    f64[n + 1]: C(n - c, k) / C(n, k).
    """
    i = np.arange(k)
    return np.prod(np.clip(n - np.arange(n + 1)[:, None] - i, 0, None) / (n - i), axis=1)


def variance_at(rates: np.ndarray, n: int, k: int) -> np.ndarray:
    """Variance of the pass@k estimate from n responses, for each pass rate in `rates`, f64."""
    fail = failure(n, k)
    probability = stats.binom.pmf(np.arange(n + 1), n, np.asarray(rates)[..., None])
    return np.maximum(probability @ fail**2 - (probability @ fail) ** 2, 0.0)


@functools.lru_cache
def _variances(n: int, k: int) -> np.ndarray:
    return variance_at(RATES, n, k)


@functools.lru_cache
def _likelihood(n: int) -> np.ndarray:
    return stats.binom.pmf(np.arange(n + 1)[:, None], n, RATES)


def rate_distribution(correct: np.ndarray, n: int, iterations: int = 150) -> np.ndarray:
    """Estimated distribution of pass rates over questions, f64[len(RATES)] that sums to 1:
    maximum-likelihood weights of `RATES`, by EM.

    Args:
      correct: i64[Q], correct responses out of n.
    """
    counts = np.bincount(correct, minlength=n + 1)
    likelihood = _likelihood(n)
    weights = np.full(len(RATES), 1 / len(RATES))
    for _ in range(iterations):
        weights = (
            weights
            * ((counts / np.maximum(likelihood @ weights, 1e-300)) @ likelihood)
            / len(correct)
        )
    return weights


def sampling_variance(correct: np.ndarray, n: int, k: int) -> float:
    """Variance of mean pass@k over questions, from the sampling of responses alone.

    A question's estimate is 1 - F_k, F_k = `failure`, whose mean is (1-p)^k. Hence F_k^2 - F_2k is
    an unbiased estimate of its variance if 2k <= n (for k = 1 it is c (n-c) / n^2 / (n-1)). For
    larger k there is none; then the variance is averaged over the estimated distribution of pass
    rates. In both cases one question with the maximum variance is added, because questions whose
    responses were all correct or all wrong may have other pass rates than 0 or 1.
    """
    questions = len(correct)
    if 2 * k <= n:
        total = float((failure(n, k) ** 2 - failure(n, 2 * k))[correct].sum())
    else:
        total = questions * float(rate_distribution(correct, n) @ _variances(n, k))
    return (max(total, 0.0) + float(_variances(n, k).max())) / questions**2


def adjusted(mean: float, trials: float, z: float = Z) -> tuple[float, float]:
    """Agresti and Coull's interval for a mean of [0, 1] values, with the certainty of a share among
    `trials` independent coin tosses.

    It has the centre of Wilson's interval and is slightly wider. The coverage of Wilson's interval
    falls to 0.88 if one response in a thousand is correct.
    """
    trials, mean_ = trials + z * z, (mean * trials + z * z / 2) / (trials + z * z)
    width = z * np.sqrt(mean_ * (1 - mean_) / trials)
    return float(min(max(mean_ - width, 0.0), mean)), float(max(min(mean_ + width, 1.0), mean))


def same_questions(correct: np.ndarray, n: int, k: int) -> tuple[float, float]:
    """Interval of mean pass@k over the same questions, with other responses.

    Args:
      correct: i64[Q], correct responses out of n each.
    """
    mean = float(1 - failure(n, k)[correct].mean())
    # Lower bound on the trials: a U-statistic of degree k has at most k/n of its kernel's variance
    # (Hoeffding 1948), and questions of unequal pass rates vary less than equal ones.
    least = len(correct) * n / k
    if n == 1:
        return adjusted(mean, least)  # with one response the variance of a question is unknown
    return adjusted(mean, max(least, mean * (1 - mean) / sampling_variance(correct, n, k)))


def other_questions(correct: np.ndarray, n: int, k: int) -> tuple[float, float]:
    """Interval of mean pass@k over the population from which the questions were drawn.

    The variance between questions includes both sources of randomness. Student's t is used, because
    this variance is estimated. Arguments: as `same_questions`.
    """
    values = 1 - failure(n, k)[correct]
    questions = len(correct)
    mean = float(values.mean())
    trials = float(questions)
    z = Z
    variance = float(values.var(ddof=1)) / questions if questions > 1 else 0.0
    # Values in [0, 1] have at most the variance of coin tosses, which needs no estimate.
    if variance > 0 and (found := mean * (1 - mean) / variance) > trials:
        trials = found
        z = float(special.stdtrit(questions - 1, 0.975))
    return adjusted(mean, trials, z)


def combine(means: np.ndarray, intervals: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Interval of sum(weights * means) for independent means, from their intervals f64[B, 2], which
    may be asymmetric.

    Source: Zou and Donner (2008), the method of variance estimates recovery.
    """
    means = np.asarray(means)
    weights = np.asarray(weights)
    low, high = np.asarray(intervals).T
    centre = float(weights @ means)
    return (
        max(centre - float(np.sqrt((weights**2) @ (means - low) ** 2)), 0.0),
        min(centre + float(np.sqrt((weights**2) @ (high - means) ** 2)), 1.0),
    )
