"""The reference policy of a KL penalty."""

from collections.abc import Callable
from typing import Any


class Reference:
    """The initial policy of the run, or that of the latest outer iteration.

    Args:
      params: weights of the initial policy. every: steps of an outer iteration; 0: the first
        reference stays.
      snapshot: params -> a copy that survives the donation of the state.

    Attributes:
      since: the step of its policy.
    """

    def __init__(self, params: Any, every: int, snapshot: Callable[[Any], Any]):
        self.params = params
        self.since = 0
        self._every = every
        self._snapshot = snapshot

    def refresh(self, step: int, params: Any) -> None:
        """Makes the current policy the reference, if an outer iteration begins after `step`
        steps.
        """
        if self._every and step % self._every == 0:
            self.params = None  # frees the old copy first
            self.params = self._snapshot(params)
            self.since = step

    def restore(self, saved: Any, since: int, step: int, params: Any) -> None:
        """Continues at `step` with the reference of step `since`: `saved`, or the current policy if
        both steps are equal.

        Checkpoints without a reference have the initial policy as reference (since 0).
        """
        if since:
            self.params = self._snapshot(params) if since == step else saved
            self.since = since

    def to_save(self, step: int) -> Any:
        """Its weights to save, or None if they are the initial policy's or those saved at
        `step`.
        """
        return self.params if 0 < self.since < step else None
