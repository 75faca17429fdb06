"""Rewards that depend on all samples of a prompt: known when its group is whole.

The step shapes what it trains on, just before; the driver what rules and the replay cache look at.
"""

import dataclasses

import jax
import numpy as np

from rl_speed.config import Config, Reward
from rl_speed.data.rollouts import Rollouts
from rl_speed.rewards import length_aware_reward

_length_aware = jax.jit(
    length_aware_reward,
    static_argnums=3,
    static_argnames=("alpha", "low", "high", "reference", "literal"),
)


def shape_rewards(rollouts: Rollouts, config: Config) -> Rollouts:
    """The groups with the length-aware reward of `config.reward` (RPO),
    or as they are where `length_alpha` is 0.

    What is shaped is the verdict, `correct` as 0 or 1, before its weight; what else the reward
    holds (format, language, the overlong penalty, functions of the user's own) is added to that. So
    a wrong answer in good form is not taken for a right one. `correct` and the rollouts given stay
    as they are. Samples that are `nonfinite` take no part, and keep their reward.

    Args:
      rollouts: whole groups, any number; lengths are tokens of the whole response.

    Source: Yi et al. (methods.md, section 4).
    """
    r = config.reward
    groups = config.driver.groups
    if not r.length_alpha:
        return rollouts
    correct = rollouts.correct.astype(np.float32)
    # Blocks of so many groups, padded to the most samples there can be: it compiles once.
    firsts = np.searchsorted(rollouts.owner, np.arange(0, len(rollouts.prompts), groups))
    room = groups * config.make_rule().max_samples
    ids = np.where(rollouts.nonfinite, -1, rollouts.owner % groups)
    blocks = [
        _block(correct[part], rollouts.lengths[part], ids[part], groups, room, r)
        for part in map(slice, firsts, [*firsts[1:], len(rollouts)])
    ]
    weight = np.float32(r.accuracy_weight)
    shaped = np.concatenate(blocks)
    return dataclasses.replace(
        rollouts, rewards=weight * shaped + (rollouts.rewards - weight * correct)
    )


def _block(
    correct: np.ndarray, lengths: np.ndarray, ids: np.ndarray, groups: int, room: int, r: Reward
) -> np.ndarray:
    """f32[R] of at most `groups` groups."""
    padding = (0, max(room - len(correct), 0))
    shaped = _length_aware(
        np.pad(correct, padding),
        np.pad(lengths, padding),
        np.pad(ids, padding, constant_values=-1),
        groups,
        alpha=r.length_alpha,
        low=r.length_low,
        high=r.length_high,
        reference=r.length_reference,
        literal=r.length_literal,
    )
    return np.asarray(shaped)[: len(correct)]
