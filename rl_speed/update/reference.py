"""The reference policy of a KL penalty."""

from collections.abc import Callable
from typing import Any


class Reference:
    """The reference policy: the initial policy, or the policy at the start of the current outer
    iteration.

    Args:
      params: trained weights of the initial policy; with LoRA its adapters. every: steps of an
        outer iteration; 0: the initial policy stays.
      snapshot: all weights -> a copy of the trained ones that survives the donation of the state.

    Attributes:
      params: trained weights of the reference policy. since: steps trained when they were copied.
    """

    def __init__(self, params: Any, every: int, snapshot: Callable[[Any], Any]):
        self.params = params
        self.since = 0
        self._every = every
        self._snapshot = snapshot

    def refresh(self, step: int, params: Any) -> None:
        """Makes the current policy the reference if an outer iteration starts after step `step`."""
        if self._every and step % self._every == 0:
            self.params = None  # frees the old copy first
            self.params = self._snapshot(params)
            self.since = step

    def restore(self, saved: Any, since: int, step: int, params: Any) -> None:
        """Restores the reference of step `since` in a run that resumes at `step`: `saved`, or the
        current policy if the steps are equal.

        With since = 0 the reference stays the initial policy, which checkpoints do not contain.
        """
        if since:
            self.params = self._snapshot(params) if since == step else saved
            self.since = since

    def to_save(self, step: int) -> Any:
        """Returns the weights to save in a checkpoint at `step`, or None if they are those of the
        initial policy or of the checkpoint's policy.
        """
        return self.params if 0 < self.since < step else None
