"""What is remembered between calls: complete groups that wait for training, and pass rates of prompts visited before."""

from rl_speed.memory.buffer import BufferFull, SamplingBuffer
from rl_speed.memory.estimates import BetaEma, qualifying
from rl_speed.memory.group import CONTINUE, SCREEN, Group

__all__ = ["CONTINUE", "SCREEN", "BetaEma", "BufferFull", "Group", "SamplingBuffer", "qualifying"]
