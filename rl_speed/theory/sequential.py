"""What a sequential stopping rule costs, exactly: Reinforce-Ada's rounds as a Markov chain over (round, positives)."""

from typing import NamedTuple

import numpy as np

from rl_speed.theory import _check
from rl_speed.theory._binomial import pmf


class SequentialCost(NamedTuple):
    """Exact expectations for one prompt, float64 of p's shape.

    Attributes:
      samples: drawn until the prompt leaves.
      resolved: probability that it leaves with k_pos positives and k_neg negatives.
      pass_rate: E[p_hat], the share of positives in the pool at the end. Optional stopping biases it: upwards where the rule
        waits for positives alone, towards one half where it waits for both.
      exits: [..., rounds], probability of leaving after each round; in the last one unresolved prompts leave too.
    """

    samples: np.ndarray
    resolved: np.ndarray
    pass_rate: np.ndarray
    exits: np.ndarray


def sequential_cost(p, m: int, rounds: int, k_pos: int, k_neg: int = 0) -> SequentialCost:
    """Cost of drawing m samples a round until k_pos are right and k_neg wrong, at most `rounds` times.

    Args:
      p: pass rate(s) in [0, 1], any shape. m: samples a round. rounds: at most. k_pos, k_neg: what resolves a prompt; not both 0.

    Returns:
      SequentialCost.

    Raises:
      ValueError: p outside [0, 1], m or rounds below 1, k_pos or k_neg below 0, or both 0 (there is nothing to wait for).

    Source: Reinforce-Ada, Algorithm 1 and Figure 10; the dynamic programme is ours.
    """
    p = _check.probability(p)
    m, rounds = _check.count(m, "m", 1), _check.count(rounds, "rounds", 1)
    k_pos, k_neg = _check.count(k_pos, "k_pos", 0), _check.count(k_neg, "k_neg", 0)
    if k_pos == k_neg == 0:
        raise ValueError("k_pos and k_neg are both 0: every prompt is resolved before its first sample")
    step = pmf(p, m)
    waiting = np.ones((*p.shape, 1))  # of the prompts still active: probability of 0..n positives
    samples, resolved, pass_rate, exits = np.zeros(p.shape), np.zeros(p.shape), np.zeros(p.shape), []
    for i in range(1, rounds + 1):
        n = i * m
        after = np.zeros((*p.shape, n + 1))
        for k in range(m + 1):
            after[..., k:k + waiting.shape[-1]] += waiting * step[..., k:k + 1]
        positive = np.arange(n + 1)
        done = (positive >= k_pos) & (n - positive >= k_neg)
        resolved = resolved + after[..., done].sum(-1)
        leaves = done | (i == rounds)
        out = after * leaves
        exits.append(out.sum(-1))
        samples = samples + n * exits[-1]
        pass_rate = pass_rate + (out * (positive / n)).sum(-1)
        waiting = after * ~leaves
    return SequentialCost(samples[()], resolved[()], pass_rate[()], np.stack(exits, -1))
