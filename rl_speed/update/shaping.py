"""Rewards that depend on all samples of a prompt: known when its group is complete,
just before it is trained on.
"""

import dataclasses

import jax
import numpy as np

from rl_speed.config import Config
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
      rollouts: complete groups, at most `config.driver.groups`; lengths are tokens of the
        whole response.

    Source: Yi et al. (methods.md, section 4).
    """
    r = config.reward
    if not r.length_alpha:
        return rollouts
    # Padded to the most there can be, so that it compiles once.
    padding = (0, max(config.driver.groups * config.make_rule().max_samples - len(rollouts), 0))
    correct = rollouts.correct.astype(np.float32)
    ids = np.where(rollouts.nonfinite, -1, rollouts.owner)
    shaped = np.asarray(
        _length_aware(
            np.pad(correct, padding),
            np.pad(rollouts.lengths, padding),
            np.pad(ids, padding, constant_values=-1),
            config.driver.groups,
            alpha=r.length_alpha,
            low=r.length_low,
            high=r.length_high,
            reference=r.length_reference,
            literal=r.length_literal,
        )
    )[: len(rollouts)]
    weight = np.float32(r.accuracy_weight)
    return dataclasses.replace(
        rollouts, rewards=weight * shaped + (rollouts.rewards - weight * correct)
    )
