"""What is remembered between calls: complete groups that wait for training,
pass rates of prompts visited before, and responses to start from.
"""

from rl_speed.data.rollouts import Rollouts
from rl_speed.replay.cache import CacheReport, ReplayCache
from rl_speed.replay.cuts import PrefixConfig, cuts, suffix_budget
from rl_speed.replay.responses import CachedResponse
from rl_speed.rollout.acceptance import Acceptance, qualified, qualifying
from rl_speed.rollout.buffer import BufferFull, SamplingBuffer
from rl_speed.rollout.counted import BetaEma

Group = Rollouts.group  # of one prompt

__all__ = [
    "Acceptance",
    "BetaEma",
    "BufferFull",
    "CacheReport",
    "CachedResponse",
    "Group",
    "PrefixConfig",
    "ReplayCache",
    "SamplingBuffer",
    "cuts",
    "qualified",
    "qualifying",
    "suffix_budget",
]
