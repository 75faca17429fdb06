"""95% intervals of pass@k, for two different questions.

An evaluation draws n responses to each of Q questions. How sure is the number that comes out? That
depends on what is thought to be drawn anew:

- *same questions, other responses*: the benchmark is what it is, only the sampling of responses is
  chance. Right for comparing checkpoints on one benchmark, and shrinks with n.
- *other questions like these*: the questions are a sample, too. Right for what the number says of
  the policy's ability; the responses to a question then form a cluster, and the interval shrinks
  with Q alone (Miller, 'Adding Error Bars to Evals', arXiv 2411.00640).

Each takes its variance V as below and then Agresti and Coull's interval (1998), with the number of
independent trials that would have this variance, m (1 - m) / V at the mean m, in place of a count
(as for surveys by clusters: Korn and Graubard 1998; Dean and Pagano 2015). So an interval stays
inside [0, 1], is lopsided near its ends, and is never of no width: the number of trials is bounded
below by what theory grants, and V never takes the questions' own rates for exactly 0 or 1 (see
`sampling_variance`). All of it is in closed form or iterated deterministically; nothing is drawn.

Coverage on simulated benchmarks is tested (tests/evaluation/test_evaluation_intervals.py): near
0.95, and above it where hardly anything varies. It falls short, to 0.9 and at worst near 0.8, where
k is nearly n, or there are a few dozen questions, and everything hangs on the few among them that
are solved now and then: no interval can know of what no response showed.
"""

import functools

import numpy as np
from scipy import special, stats

Z = float(special.ndtri(0.975))
# Pass rates on which a distribution of them is estimated, both ends included, denser towards them.
RATES = np.sin(np.linspace(0, np.pi / 2, 61)) ** 2


@functools.lru_cache
def failure(n: int, k: int) -> np.ndarray:
    """C(n - c, k) / C(n, k) for c = 0..n right responses, f64[n + 1]:
    the share of k-subsets without a right one.
    """
    i = np.arange(k)
    return np.prod(np.clip(n - np.arange(n + 1)[:, None] - i, 0, None) / (n - i), axis=1)


def variance_at(rates: np.ndarray, n: int, k: int) -> np.ndarray:
    """Variance of the estimate of pass@k from n responses to a question of pass rate p,
    for each p of `rates`, f64.
    """
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
    """How pass rates are distributed over questions, f64[len(RATES)] that sums to 1:
    most likely weights of `RATES`, by EM.

    Args:
      correct: i64[Q], right responses out of n.
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
    """Variance of the mean over questions of pass@k, from the sampling of responses alone.

    A question's estimate is 1 - F_k, F_k = `failure`, whose mean is (1-p)^k. Hence F_k^2 - F_2k is
    an unbiased estimate of its variance where 2k <= n (for k = 1 it is c (n-c) / n^2 / (n-1)). For
    larger k there is none: then the variance is averaged over the estimated distribution of pass
    rates. To either, one question of the pass rate at which the estimate varies most is added:
    rates that all look like 0 or 1 are not known to be.
    """
    questions = len(correct)
    if 2 * k <= n:
        total = float((failure(n, k) ** 2 - failure(n, 2 * k))[correct].sum())
    else:
        total = questions * float(rate_distribution(correct, n) @ _variances(n, k))
    return (max(total, 0.0) + float(_variances(n, k).max())) / questions**2


def adjusted(mean: float, trials: float, z: float = Z) -> tuple[float, float]:
    """Agresti and Coull's interval for a mean of [0, 1] values that is as certain as a share of
    `trials` coin tosses.

    Wilson's centre and a little more than its width: Wilson's own falls to 0.88 where one response
    in a thousand is right.
    """
    trials, mean_ = trials + z * z, (mean * trials + z * z / 2) / (trials + z * z)
    width = z * np.sqrt(mean_ * (1 - mean_) / trials)
    return float(min(max(mean_ - width, 0.0), mean)), float(max(min(mean_ + width, 1.0), mean))


def same_questions(correct: np.ndarray, n: int, k: int) -> tuple[float, float]:
    """Interval of mean pass@k over these very questions, had other responses been drawn.

    Args:
      correct: i64[Q], right responses out of n each.
    """
    mean = float(1 - failure(n, k)[correct].mean())
    # The variance of a U-statistic of degree k is at most k/n of its kernel's (Hoeffding 1948), and
    # questions of unequal pass rates vary less than equal ones: at least so many trials.
    least = len(correct) * n / k
    if n == 1:
        return adjusted(mean, least)  # one response says nothing of how a question's responses vary
    return adjusted(mean, max(least, mean * (1 - mean) / sampling_variance(correct, n, k)))


def other_questions(correct: np.ndarray, n: int, k: int) -> tuple[float, float]:
    """Interval of mean pass@k over the population that these questions were drawn from;
    arguments as `same_questions`.

    The spread between questions holds both sources of chance; with Student's t, since it is
    itself estimated.
    """
    values = 1 - failure(n, k)[correct]
    questions = len(correct)
    mean = float(values.mean())
    trials = float(questions)
    z = Z
    variance = float(values.var(ddof=1)) / questions if questions > 1 else 0.0
    # Values of [0, 1] vary no more than coin tosses, whose interval needs no estimate of
    # their variance.
    if variance > 0 and (found := mean * (1 - mean) / variance) > trials:
        trials = found
        z = float(special.stdtrit(questions - 1, 0.975))
    return adjusted(mean, trials, z)


def combine(means: np.ndarray, intervals: np.ndarray, weights: np.ndarray) -> tuple[float, float]:
    """Interval of sum(weights * means) of independent means from their own intervals,
    f64[B, 2] (lopsided ones, too).

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
