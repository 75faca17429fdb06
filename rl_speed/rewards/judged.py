"""Results of a verifier or reward function, and the check that ends a run when it always fails."""

import collections
import dataclasses
from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from rl_speed.rewards.pool import UNGRADED

# A run ends after this many failed responses in a row, of at least two prompts. A single response
# that cannot be judged, or a single row that a function cannot read, does not end it.
MANY = 8


@dataclasses.dataclass(frozen=True)
class Judged:
    """Values of R responses.

    Attributes:
      values: f32[R]; 0 where there is none.
      causes: the cause under which each is counted.
      numbers: f32[R] by name, which a function returned with its values; NaN where it did not.
      message: why the latest response without a value has none.
    """

    values: np.ndarray
    causes: list[str]
    numbers: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    message: str = ""

    @property
    def failed(self) -> np.ndarray:
        """bool[R]: whether there is no value."""
        return np.isin(self.causes, UNGRADED)


def counted(lost: Mapping[str, int]) -> str:
    """Numbers by cause, for people."""
    return ", ".join(f"{n} ({cause})" for cause, n in lost.items())


class RewardError(RuntimeError):
    """A verifier or a reward function fails on every response: training would go on with zeros."""

    exit_status = 1


class FailureWatch:
    """Ends a run whose verifier or reward function fails on whole generation calls."""

    def __init__(self) -> None:
        self._count: collections.Counter[str] = collections.Counter()
        self._prompts: dict[str, set[Hashable]] = {}

    def see(self, name: str, failed: np.ndarray, prompts: Sequence[Hashable], message: str) -> None:
        """Records one call: `failed` bool[R] and `message` are from `Judged`, `name` is for errors.

        Raises:
          RewardError: all responses failed, in this call and since the last value: `MANY` or more,
            of at least two prompts.
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
