"""Rewards that depend on all samples of a prompt: known when its group is complete, just before it is trained on."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from rl_speed.config import Config
from rl_speed.data.group import Group
from rl_speed.rewards import length_aware_reward

_length_aware = jax.jit(length_aware_reward, static_argnums=3,
                        static_argnames=("alpha", "low", "high", "reference", "literal"))


def shape_groups(groups: Sequence[Group], config: Config) -> list[Group]:
    """The groups with the length-aware reward of `config.reward` (RPO), or as they are where `length_alpha` is 0.

    What is shaped is the verdict, `correct` as 0 or 1, before its weight; what else the reward holds (format, language, the
    overlong penalty, functions of the user's own) is added to that. So a wrong answer in good form is not taken for a right one.
    `correct` and the groups given stay as they are. Samples that are `nonfinite` take no part, and keep their reward.

    Args:
      groups: complete ones, at most `config.driver.groups`; lengths are tokens of the whole response.

    Source: Yi et al. (methods.md, section 4).
    """
    r = config.reward
    if not r.length_alpha or not groups:
        return list(groups)
    sizes = [len(g) for g in groups]
    # Padded to the most there can be, so that it compiles once.
    padding = (0, max(config.driver.groups * config.make_rule().max_samples - sum(sizes), 0))
    correct = np.concatenate([g.correct for g in groups]).astype(np.float32)
    lengths = np.concatenate([g.lengths for g in groups])
    ids = np.repeat(np.arange(len(groups), dtype=np.int32), sizes)
    ids[np.concatenate([g.nonfinite for g in groups])] = -1
    shaped = np.asarray(_length_aware(
        np.pad(correct, padding), np.pad(lengths, padding), np.pad(ids, padding, constant_values=-1), config.driver.groups,
        alpha=r.length_alpha, low=r.length_low, high=r.length_high, reference=r.length_reference, literal=r.length_literal))
    pieces = np.split(shaped[:len(correct)], np.cumsum(sizes)[:-1])
    weight = np.float32(r.accuracy_weight)
    return [dataclasses.replace(g, rewards=weight * piece + (g.rewards - weight * g.correct)) for g, piece in zip(groups, pieces)]
