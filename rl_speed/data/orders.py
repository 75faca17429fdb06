"""The order in which prompts of a finite data set leave the stream.

An `EpochOrder` is a permutation of the data set for each epoch, known in advance. `VisitOrder` and
`ForecastOrder` choose by results, which the stream reports (`PromptStream.observe`); prompts that
are out are not chosen again before they are back. Orders use indices into the data set. All
randomness is keyed by the seed and by counts, so a restored order continues as the saved one.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

# First part of this module's random keys, so no other code has the same: a data set that was mixed
# by an order's own first permutation would come back sorted.
KEY = int.from_bytes(b"memory order")


@dataclasses.dataclass(frozen=True)
class EpochOrder:
    """A permutation i64[size] of the data set for each epoch: `permutation(epoch)`.

    `name` is kept in checkpoints.
    """

    name: str
    permutation: Callable[[int], np.ndarray]


def shuffled(size: int, seed: int) -> EpochOrder:
    """A new shuffle for each epoch."""
    return EpochOrder(
        "shuffle", lambda epoch: np.random.default_rng([seed, epoch]).permutation(size)
    )


def in_file_order(size: int) -> EpochOrder:
    """The data's own order, every epoch."""
    return EpochOrder("file", lambda epoch: np.arange(size))


def easy_to_hard(rates: Sequence[float], seed: int) -> EpochOrder:
    """The offline schedule of Bae et al. (arXiv 2504.03380): highest pass rate first, in every
    epoch; ties in a new shuffle.

    Args:
      rates: f[size] in [0, 1], measured before training by a proxy.
    """
    rates = np.asarray(rates, np.float64)

    def permutation(epoch: int) -> np.ndarray:
        shuffle = np.random.default_rng([seed, epoch]).permutation(len(rates))
        return shuffle[np.argsort(-rates[shuffle], kind="stable")]

    return EpochOrder("schedule", permutation)


class AdaptiveOrder(Protocol):
    """An order that depends on results. `name` is kept in checkpoints."""

    name: str

    def pick(self, n: int, serial: int, out: np.ndarray) -> np.ndarray:
        """Indices of the next prompts, whose visits start at `serial`: n, or fewer if fewer are not
        `out` (bool[size]).
        """

    def observe(
        self,
        index: Sequence[int],
        correct: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float],
    ) -> None:
        """Report finished prompts: `correct` of the `total` samples of each. `tokens` is
        the mean per sample, NaN if unknown.
        """

    def metrics(self, serial: int) -> dict[str, float]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class VisitOrder:
    """Least visited prompts first. A visit counts when a prompt's samples are complete, accepted or
    not. Ties are shuffled.

    Source: Bae et al. (arXiv 2504.03380), Algorithm 1.
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

    def observe(self, index, correct, total, tokens=()) -> None:
        del correct, total, tokens
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


class ForecastOrder:
    """Picks the prompts with the most learning value by a forecast of their pass rates, which needs
    no visit. Not from a paper.

    A share `explore` of the picked prompts is drawn uniformly (independently for each). The rest
    have the highest value in `forecast.screening`; ties are random. Until `forecast.readiness` is 1
    the share is larger, and 1 at first: picks by an untrained forecast are all alike, and teach
    neither forecast nor policy. A prompt rests for `rest` x size visits. If too few have rested,
    those that left least recently are picked.

    Args:
      size: prompts. forecast: `estimates.forecast.Forecast` of all of them, which gets the results,
        and is saved. explore: in [0, 1]. rest: in epochs, in [0, 1).
    """

    name = "forecast"

    def __init__(self, size: int, forecast: Any, seed: int, explore: float, rest: float):
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

    def observe(self, index, correct, total, tokens) -> None:
        self.forecast.update(index, correct, total, tokens)

    def metrics(self, serial: int) -> dict[str, float]:
        """Share of the prompts that left within the last epoch, and the forecast's metrics."""
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
