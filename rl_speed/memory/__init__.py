"""What is remembered between calls: complete groups that wait for training."""

from rl_speed.memory.buffer import BufferFull, SamplingBuffer
from rl_speed.memory.group import CONTINUE, SCREEN, Group

__all__ = ["CONTINUE", "SCREEN", "BufferFull", "Group", "SamplingBuffer"]
