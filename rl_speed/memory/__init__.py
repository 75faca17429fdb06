"""What is remembered between calls: complete groups that wait for training, pass rates of prompts visited before, and responses
to start from."""

from rl_speed.memory.acceptance import Acceptance, qualified, qualifying
from rl_speed.memory.buffer import BufferFull, SamplingBuffer
from rl_speed.memory.estimates import BetaEma
from rl_speed.memory.group import CONTINUE, SCREEN, Group
from rl_speed.memory.prefixes import PrefixConfig, cuts, suffix_budget
from rl_speed.memory.replay import CacheReport, ReplayCache
from rl_speed.memory.responses import CachedResponse

__all__ = ["CONTINUE", "SCREEN", "Acceptance", "BetaEma", "BufferFull", "CacheReport", "CachedResponse", "Group", "PrefixConfig",
           "ReplayCache", "SamplingBuffer", "cuts", "qualified", "qualifying", "suffix_budget"]
