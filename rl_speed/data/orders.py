"""Which prompt of a finite data set leaves the stream next.

Two kinds. An `EpochOrder` is a permutation of the data set for each epoch, known in advance: a
shuffle, the data's own order, easy to hard. `VisitOrder` and `ForecastOrder` choose by what came
back; the stream tells them (`PromptStream.observe`), and remembers which prompts are out, none of
which is chosen again before it is back.

Orders deal in indices into the data set. All randomness is keyed by the seed and by counts, so that
a restored order goes on as the saved one would have.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

# Begins the keys of its draws, so that they are its own. A data set that was mixed by the very
# permutation with which an order starts would come back sorted (the chain task at seed 0 was: its
# hopeless class came first).
KEY = int.from_bytes(b"memory order")


@dataclasses.dataclass(frozen=True)
class EpochOrder:
    """A permutation i64[size] of the data set for each epoch: `permutation(epoch)`.

    `name` is kept in checkpoints.
    """

    name: str
    permutation: Callable[[int], np.ndarray]


def shuffled(size: int, seed: int) -> EpochOrder:
    """A new shuffle each epoch."""
    return EpochOrder(
        "shuffle", lambda epoch: np.random.default_rng([seed, epoch]).permutation(size)
    )


def in_file_order(size: int) -> EpochOrder:
    """The data's own order, every epoch."""
    return EpochOrder("file", lambda epoch: np.arange(size))


def easy_to_hard(rates: Sequence[float], seed: int) -> EpochOrder:
    """The offline schedule of Bae et al. (arXiv 2504.03380): highest pass rate first,
    every epoch; ties in a new shuffle.

    Args:
      rates: f[size] in [0, 1], measured before training by a proxy.
    """
    rates = np.asarray(rates, np.float64)

    def permutation(epoch: int) -> np.ndarray:
        shuffle = np.random.default_rng([seed, epoch]).permutation(len(rates))
        return shuffle[np.argsort(-rates[shuffle], kind="stable")]

    return EpochOrder("schedule", permutation)


class AdaptiveOrder(Protocol):
    """An order that depends on what came back. `name` is kept in checkpoints."""

    name: str

    def pick(self, n: int, serial: int, out: np.ndarray) -> np.ndarray:
        """Indices of the next prompts, which get the visits from `serial` on: n,
        or as many as are not `out` (bool[size]).
        """

    def observe(
        self,
        index: Sequence[int],
        positive: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float],
    ) -> None:
        """These prompts are back: of `total` samples each, `positive` were right; mean tokens of a
        sample, NaN where nobody knows.
        """

    def metrics(self, serial: int) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class VisitOrder:
    """Least visited first; a visit counts when a prompt's samples are in, accepted or not.

    Among prompts of equal count, a shuffle.

    Source: Bae et al. (arXiv 2504.03380), Algorithm 1; methods.md section 2.
    """

    name = "visits"

    def __init__(self, size: int, seed: int):
        self._seed = seed
        self._visits = np.zeros(size, np.int64)

    def pick(self, n: int, serial: int, out: np.ndarray) -> np.ndarray:
        del serial
        chosen = [np.zeros(0, np.int64)]
        missing = n
        for count in np.unique(self._visits[~out]):
            shuffle = np.random.default_rng([self._seed, count]).permutation(len(out))
            chosen.append(shuffle[(self._visits[shuffle] == count) & ~out[shuffle]][:missing])
            missing -= len(chosen[-1])
            if not missing:
                break
        return np.concatenate(chosen)

    def observe(
        self,
        index: Sequence[int],
        positive: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float] = (),
    ) -> None:
        del positive, total, tokens
        np.add.at(self._visits, np.asarray(index, np.int64), 1)

    def metrics(self, serial: int) -> dict[str, float]:
        """Smallest and largest number of visits."""
        del serial
        return {
            "prompts/visits_min": float(self._visits.min()),
            "prompts/visits_max": float(self._visits.max()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"visits": self._visits.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._visits = np.array(state["visits"], np.int64)


class Forecast(Protocol):
    """What `ForecastOrder` needs to know of prompts; `rollout.forecast.Forecast` is it."""

    @property
    def readiness(self) -> float: ...
    def screening(self) -> tuple[np.ndarray, np.ndarray]: ...
    def update(
        self,
        index: Sequence[int],
        positive: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float],
    ) -> None: ...
    def metrics(self) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class ForecastOrder:
    """The prompts that teach most by a forecast of their pass rates, which needs no visit. Not from
    a paper.

    Of n prompts to pick a share `explore` (a coin for each) is drawn uniformly; the rest are worth
    most by `forecast.screening`, ties by lot. Until `forecast.readiness` is 1 the share is larger,
    at first everyone: what was picked by a forecast that knows nothing is all alike, and teaches
    neither forecast nor policy. None goes again before `rest` x size visits; where too few have
    rested, those that left least recently go.

    Args:
      size: prompts. forecast: of all of them; this order tells it what came back, and saves it.
      seed: of all draws, each keyed by the visit at which it is made. explore: in [0, 1].
        rest: in epochs, in [0, 1).

    Raises ValueError naming the argument that is out of range.
    """

    name = "forecast"

    def __init__(self, size: int, forecast: Forecast, seed: int, explore: float, rest: float):
        for name, value, ok, say in (
            ("explore", explore, 0 <= explore <= 1, "in [0, 1]"),
            ("rest", rest, 0 <= rest < 1, "in [0, 1)"),
        ):
            if not ok:
                raise ValueError(f"ForecastOrder.{name} must be {say}; got {value!r}")
        self.forecast = forecast
        self._seed = seed
        self._explore = explore
        self._rest = rest * size
        self._last = np.full(size, -size, np.int64)  # visit of the latest departure

    def pick(self, n: int, serial: int, out: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([KEY, self._seed, serial])
        free = rng.permutation(np.flatnonzero(~out))
        ready = serial - self._last[free] >= self._rest
        if ready.sum() < n:
            ready = np.argsort(np.argsort(self._last[free], kind="stable")) < n
        free = free[ready]
        n = min(n, len(free))
        explored = rng.binomial(n, max(self._explore, 1 - self.forecast.readiness))
        tried = free[:explored]
        free = free[explored:]
        worth = self.forecast.screening()[1][free]
        best = free[np.argsort(-worth, kind="stable")[: n - explored]]
        chosen = rng.permutation(np.concatenate([tried, best]))
        self._last[chosen] = serial + np.arange(len(chosen))
        return chosen

    def observe(
        self,
        index: Sequence[int],
        positive: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float],
    ) -> None:
        self.forecast.update(index, positive, total, tokens)

    def metrics(self, serial: int) -> dict[str, float]:
        """Share of the prompts that went within the last epoch; and what the forecast says."""
        recent = self._last > serial - len(self._last)
        return {
            "prompts/went": float((recent & (self._last >= 0)).mean()),
            **self.forecast.metrics(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Departures i64[size], and the forecast."""
        return {"last": self._last.copy(), "forecast": self.forecast.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = np.array(state["last"], np.int64)
        self.forecast.load_state_dict(state["forecast"])
