"""What is remembered between calls: complete groups that wait for training, pass rates of prompts visited before, and responses
to start from."""

from rl_speed.rollout.acceptance import Acceptance, qualified, qualifying
from rl_speed.rollout.buffer import BufferFull, SamplingBuffer
from rl_speed.rollout.counted import BetaEma
from rl_speed.data.group import CONTINUE, SCREEN, Group
from rl_speed.replay.cuts import PrefixConfig, cuts, suffix_budget
from rl_speed.replay.cache import CacheReport, ReplayCache
from rl_speed.replay.responses import CachedResponse

__all__ = ["CONTINUE", "SCREEN", "Acceptance", "BetaEma", "BufferFull", "CacheReport", "CachedResponse", "Group", "PrefixConfig",
           "ReplayCache", "SamplingBuffer", "cuts", "qualified", "qualifying", "suffix_budget"]
