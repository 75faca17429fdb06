"""What a group of rewards says: advantages, losses, divergences, reward shaping.

Pure, jittable functions on flat arrays (`[R]` samples, `[R, T]` tokens) with
group ids. This room imports nothing but JAX and numpy.
"""

from rl_speed.objectives.advantages import ADVANTAGES
from rl_speed.objectives.advantages import AdvantageFn
from rl_speed.objectives.advantages import GroupStatistics
from rl_speed.objectives.advantages import check_advantage
from rl_speed.objectives.advantages import dr_grpo
from rl_speed.objectives.advantages import group_statistics
from rl_speed.objectives.advantages import grpo
from rl_speed.objectives.advantages import reinforce
from rl_speed.objectives.advantages import reinforce_pp
from rl_speed.objectives.advantages import rloo
from rl_speed.objectives.divergences import KL_KINDS
from rl_speed.objectives.divergences import kl
from rl_speed.objectives.losses import AGGREGATIONS
from rl_speed.objectives.losses import CORRECTIONS
from rl_speed.objectives.losses import LOSSES
from rl_speed.objectives.losses import LossFn
from rl_speed.objectives.losses import Tokens
from rl_speed.objectives.losses import check_loss
from rl_speed.objectives.losses import clip_where_ppo_does
from rl_speed.objectives.losses import merge_metrics
from rl_speed.objectives.losses import policy_loss
from rl_speed.objectives.losses import settings_of
from rl_speed.objectives.losses import summarise_metrics
from rl_speed.objectives.losses import token_weights
from rl_speed.objectives.pool import POOL_ADVANTAGES
from rl_speed.objectives.pool import PoolStatistics
from rl_speed.objectives.pool import balanced_downsample
from rl_speed.objectives.pool import kept_rows
from rl_speed.objectives.pool import pool_advantages
from rl_speed.objectives.pool import pool_statistics
from rl_speed.objectives.pool import prompt_weights
from rl_speed.objectives.pool import resolved
from rl_speed.objectives.shaping import kl_shaped_rewards
from rl_speed.objectives.shaping import overlong_penalty

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "AdvantageFn",
    "CORRECTIONS",
    "GroupStatistics",
    "KL_KINDS",
    "LOSSES",
    "LossFn",
    "POOL_ADVANTAGES",
    "PoolStatistics",
    "Tokens",
    "balanced_downsample",
    "check_advantage",
    "check_loss",
    "clip_where_ppo_does",
    "dr_grpo",
    "group_statistics",
    "grpo",
    "kept_rows",
    "kl",
    "kl_shaped_rewards",
    "merge_metrics",
    "overlong_penalty",
    "policy_loss",
    "pool_advantages",
    "pool_statistics",
    "prompt_weights",
    "reinforce",
    "reinforce_pp",
    "resolved",
    "rloo",
    "settings_of",
    "summarise_metrics",
    "token_weights",
]
