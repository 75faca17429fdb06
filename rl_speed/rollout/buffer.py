"""The sampling buffer: complete groups that wait for a training step (SPEED, section 4 and
Algorithm 2).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_speed.data.rollouts import Rollouts, pack, unpack

ORDERS = ("fifo", "random")


class BufferFull(ValueError):
    """More groups than there is room for. Nothing was added."""


class SamplingBuffer:
    """Holds at most `capacity` complete groups, and never drops one silently.

    The producer asks `free` (or `full`) before it screens more prompts: at the bound it
    stops screening.

    Args:
      capacity: groups.
      order: "fifo" takes the oldest first (released code), "random" draws without replacement (the
        paper's "sample").
      max_age: groups older than this many policy updates are removed by `expire`; None keeps all.
      seed: of the random order.

    Raises:
      ValueError: an argument out of range.
    """

    def __init__(
        self, capacity: int, order: str = "fifo", max_age: int | None = None, seed: int = 0
    ):
        if capacity < 1:
            raise ValueError(f"buffer.capacity must be at least 1, got {capacity}")
        if order not in ORDERS:
            raise ValueError(f"buffer.order must be one of {ORDERS}, got {order!r}")
        if max_age is not None and max_age < 0:
            raise ValueError(f"buffer.max_age must be 0 or more, or None, got {max_age}")
        self.capacity = capacity
        self.order = order
        self.max_age = max_age
        self._seed = seed
        self._groups: list[Rollouts] = []
        self._draws = self._expired = 0

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def free(self) -> int:
        """Groups that still fit."""
        return self.capacity - len(self._groups)

    @property
    def full(self) -> bool:
        """Whether nothing more fits."""
        return self.free == 0

    @property
    def largest(self) -> int:
        """Samples of the largest group held; 0 when empty."""
        return max(map(len, self._groups), default=0)

    def add(self, groups: Sequence[Rollouts]) -> None:
        """Adds groups behind those that wait.

        Raises:
          BufferFull: they do not all fit; none is added then.
        """
        if len(groups) > self.free:
            raise BufferFull(
                f"{len(groups)} groups do not fit: the sampling buffer holds {len(self)} of "
                f"{self.capacity}. Screen fewer prompts, train first, or raise buffer.capacity."
            )
        self._groups.extend(groups)

    def take(self, n: int) -> list[Rollouts]:
        """Removes and returns n groups, in order of arrival or drawn at random.

        Raises:
          ValueError: fewer than n are held.
        """
        if not 0 <= n <= len(self):
            raise ValueError(f"cannot take {n} groups: the sampling buffer holds {len(self)}")
        if self.order == "fifo":
            rows = range(n)
        else:
            # Keyed by the number of draws so far, so that the state to save is one integer.
            rows = (
                np.random.default_rng([self._seed, self._draws]).permutation(len(self))[:n].tolist()
            )
            self._draws += 1
        taken = [self._groups[row] for row in rows]
        gone = set(rows)
        self._groups = [group for row, group in enumerate(self._groups) if row not in gone]
        return taken

    def expire(self, now: int) -> list[Rollouts]:
        """Removes and returns the groups whose oldest sample is more than `max_age` updates old at
        policy version `now`.

        They are counted in `metrics`; what becomes of their prompts is the caller's choice.
        """
        if self.max_age is None:
            return []
        old = [group for group in self._groups if self._age(group, now) > self.max_age]
        self._groups = [group for group in self._groups if self._age(group, now) <= self.max_age]
        self._expired += len(old)
        return old

    def metrics(self, now: int) -> dict[str, float]:
        """Groups held and expired so far; mean and largest age of those held,
        in policy updates (0 when empty).
        """
        ages = [self._age(group, now) for group in self._groups] or [0]
        return {
            "buffer/size": float(len(self)),
            "buffer/expired": float(self._expired),
            "buffer/age_mean": float(np.mean(ages)),
            "buffer/age_max": float(max(ages)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Everything, as nested dicts of integers, strings and (never empty) numpy arrays."""
        return {
            "order": self.order,
            "seed": self._seed,
            "draws": self._draws,
            "expired": self._expired,
            "groups": pack(self._groups),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the contents.

        Capacity and maximum age stay this buffer's own: they may be changed on resume.

        Raises:
          BufferFull: more groups were saved than fit.
          ValueError: the saved buffer had another order or seed, so that the next draws
            would differ.
        """
        for name, mine in (("order", self.order), ("seed", self._seed)):
            if state[name] != mine:
                raise ValueError(
                    f"the saved sampling buffer has {name} {state[name]!r}, this one {mine!r}"
                )
        groups = unpack(state["groups"])
        if len(groups) > self.capacity:
            raise BufferFull(
                f"{len(groups)} saved groups do not fit into buffer.capacity = {self.capacity}"
            )
        self._groups = groups
        self._draws = int(state["draws"])
        self._expired = int(state["expired"])

    def _age(self, group: Rollouts, now: int) -> int:
        return now - group.oldest_version
