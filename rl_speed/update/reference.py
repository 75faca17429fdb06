"""The reference policy of a KL penalty."""

from collections.abc import Callable
from typing import Any


class Reference:
    """The policy that the run started from, or the one of the latest outer iteration.

    Args:
      params: of the policy that the run starts from. every: steps of an outer iteration; 0: the
        first reference stays.
      snapshot: params -> a copy of them, which stays when the update donates the state.

    Attributes:
      since: the step whose policy it is.
    """

    def __init__(self, params: Any, every: int, snapshot: Callable[[Any], Any]):
        self.params = params
        self.since = 0
        self._every = every
        self._snapshot = snapshot

    def refresh(self, step: int, params: Any) -> None:
        """Begin an outer iteration, where one is due after `step` steps:
        the policy as it is now becomes the reference.
        """
        if self._every and step % self._every == 0:
            self.params = None  # first, so that there are never two
            self.params = self._snapshot(params)
            self.since = step

    def restore(self, saved: Any, since: int, step: int, params: Any) -> None:
        """Continue at `step`, with the reference of step `since`: `saved`,
        or the policy itself where the two steps are one.

        A checkpoint from before there were outer iterations, or without one, has the starting
        policy for its reference (since 0).
        """
        if since:
            self.params = self._snapshot(params) if since == step else saved
            self.since = since

    def to_save(self, step: int) -> Any:
        """Its weights, where they are neither those that the run started from nor those that are
        saved at `step`; else None.
        """
        return self.params if 0 < self.since < step else None
