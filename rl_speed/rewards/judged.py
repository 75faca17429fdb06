"""What a verifier or a reward function gave for responses, and the end of a run in which it gives
nothing any more.
"""

import collections
import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from rl_speed.rewards.pool import UNGRADED

# So many responses in a row without a value, of at least two prompts, end a run: one response that
# cannot be judged, or one row that a function does not understand, does not.
MANY = 8


@dataclasses.dataclass(frozen=True)
class Judged:
    """Values of R responses.

    Attributes:
      values: f32[R]; 0 where there is none.
      causes: under which each is counted.
      numbers: f32[R] by name, what a function gave beside its value; NaN where it did not.
      message: why the latest of those without a value has none.
    """

    values: np.ndarray
    causes: list[str]
    numbers: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    message: str = ""

    @property
    def failed(self) -> np.ndarray:
        """bool[R]: whether there is no value."""
        return np.isin(self.causes, UNGRADED)


class RewardError(RuntimeError):
    """A verifier or a reward function fails on every response: training would go on with zeros."""

    exit_status = 1


class FailureWatch:
    """Ends a run whose verifier or reward function fails on whole generation calls."""

    def __init__(self) -> None:
        self._count: collections.Counter[str] = collections.Counter()
        self._prompts: dict[str, set[Hashable]] = {}

    def see(self, name: str, failed: np.ndarray, prompts: Sequence[Hashable], message: str) -> None:
        """Takes note of one call.

        Args:
          name: the field and the function, as errors call them. failed: bool[R], as of `Judged`.
          prompts: that of each response. message: why the latest of them failed.

        Raises:
          RewardError: every response of this call failed, and so did all since the last value:
            `MANY` or more, of two prompts at least.
        """
        if not failed.size:
            return
        if not failed.all():
            self._count[name] = 0
            self._prompts[name] = set()
            return
        self._count[name] += failed.size
        of = self._prompts.setdefault(name, set())
        of |= set(prompts)
        if self._count[name] >= MANY and len(of) > 1:
            raise RewardError(
                f"{name}: every call failed for the last {self._count[name]} responses, of "
                f"{len(of)} prompts; the latest: {message}. Responses without a value are worth 0: "
                "nothing can be learnt from them. Mend the function, or what it waits for, and "
                "give the same command again"
            )
