"""Which prompt of a finite data set leaves the stream next.

Two kinds. An `EpochOrder` is a permutation of the data set for each epoch, known in advance: a
shuffle, the data's own order, easy to hard. `VisitOrder` and `MemoryOrder` choose by what came
back; the stream tells them (`PromptStream.observe`), and remembers which prompts are out, none of
which is chosen again before it is back.

Orders deal in indices into the data set. All randomness is keyed by the seed and by counts, so that
a restored order goes on as the saved one would have.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

# Screening with memory explores among this share of the prompts that may go, those seen
# least recently.
OLDEST = 0.25
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
        self._seed, self._visits = seed, np.zeros(size, np.int64)

    def pick(self, n: int, serial: int, out: np.ndarray) -> np.ndarray:
        del serial
        chosen, missing = [np.zeros(0, np.int64)], n
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


class OracleOrder:
    """The prompts that teach most, by pass rates that somebody measures beside the run: what a rule
    could do at best that knew them. Not from a paper, and no way to train.

    A prompt of pass rate p is worth p^power (1-p): what a sample of it says about the gradient of
    p^power. With a power of 1 that is the signal that SPEED screens for (theory.expected_speedup);
    the smaller it is, the more are rates worth that are low and not zero. Between two
    measurements none goes twice, until all that were measured have gone.

    Args:
      size: prompts. seed: of which are measured, and of ties. power: in (0, 1]. by_tokens: whether
        worth is that of a token, or of a sample.

    Attributes:
      at: the step of the latest measurement; -1 before the first.
    """

    name = "oracle"

    def __init__(self, size: int, seed: int, power: float = 1.0, by_tokens: bool = False):
        self._seed, self.at, self._count = seed, -1, 0
        self._power, self._by_tokens = power, by_tokens
        self._value = np.full(size, np.nan)
        self._gone = np.zeros(size, bool)

    def pool(self, n: int) -> tuple[str, np.ndarray]:
        """(a name of their own for the next measurement, indices of the prompts to measure)."""
        rng = np.random.default_rng([KEY, self._seed, self._count])
        return f"oracle {self._count}", np.sort(rng.permutation(len(self._value))[:n])

    def learn(self, step: int, index: np.ndarray, rates: np.ndarray, tokens: np.ndarray) -> None:
        """Pass rates f64[n] and mean lengths f64[n] of these prompts at a step; what was measured
        before is forgotten.
        """
        self._value[:], self._gone[:] = np.nan, False
        worth = np.power(rates, self._power) * (1 - rates)
        if self._by_tokens:
            worth = worth / tokens
        # Rates of few samples are often the same: by lot.
        lot = np.random.default_rng([KEY, self._seed, self._count, 1]).permutation(len(index))
        self._value[index] = worth + 1e-9 * lot
        self.at, self._count = step, self._count + 1

    def pick(self, n: int, serial: int, out: np.ndarray) -> np.ndarray:
        del serial
        # Those that were measured and have not gone; then those that have; then all others.
        last = np.where(np.isnan(self._value), 2, self._gone.astype(int))
        order = np.lexsort((-np.nan_to_num(self._value), last))
        chosen = order[~out[order]][:n]
        self._gone[chosen] = True
        return chosen

    def observe(
        self,
        index: Sequence[int],
        positive: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float] = (),
    ) -> None:
        del index, positive, total, tokens

    def metrics(self, serial: int) -> dict[str, float]:
        """Share of what was measured that has gone."""
        del serial
        known = ~np.isnan(self._value)
        return {"prompts/oracle_gone": float(self._gone[known].mean()) if known.any() else 0.0}

    def state_dict(self) -> dict[str, Any]:
        value, gone = self._value.copy(), self._gone.copy()
        return {"value": value, "gone": gone, "at": self.at, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._value, self._gone = np.array(state["value"], float), np.array(state["gone"], bool)
        self.at, self._count = int(state["at"]), int(state["count"])


class Acceptance(Protocol):
    """What `MemoryOrder` needs to know of prompts; `memory.Acceptance` is it."""

    def look(self, ids: Sequence[str]) -> tuple[np.ndarray, np.ndarray]: ...
    def draw(self, classes: np.ndarray, rng: np.random.Generator) -> np.ndarray: ...
    def update(self, ids: Sequence[str], positive: Sequence[int], total: Sequence[int]) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MemoryOrder:
    """Screening with memory: prompts that will probably qualify first,
    by what earlier visits found. Not from a paper.

    Of n prompts to pick,

    1. go those that are due, the one seen least recently leading: as many as it takes that all the
       others, were they to follow in that order, would still go within max_unseen x size visits of
       their last departure (before the first one, of the start). So no prompt is ever unseen for
       longer, as long as none is out for more than (max_unseen - 1) x size visits, and everything
       is possible before that. With max_unseen = 1 the order is that of a queue.
    2. Of the others a share `explore` (a coin for each) is drawn uniformly from the quarter seen
       least recently.
    3. The rest are those of the highest probability of qualifying, each drawn from its posterior
       (Thompson sampling), among prompts unseen for at least `rest` x size visits: without a rest
       the few best prompts would be trained on again and again. Where there are too few of them,
       those seen least recently go.

    Never-seen prompts count as seen before the start, in the order of a shuffle.

    Args:
      ids: of the prompts, all different. acceptance: `memory.Acceptance`, this order's own. seed:
        of all draws, each keyed by the visit at which it is made.
      explore: in [0, 1]. max_unseen: in epochs (visits / size), at least 1. rest: in
        epochs, in [0, 1).

    Raises ValueError naming the argument that is out of range, or the id that two prompts share.
    """

    name = "memory"

    def __init__(
        self,
        ids: Sequence[str],
        acceptance: Acceptance,
        seed: int,
        explore: float,
        max_unseen: float,
        rest: float,
    ):
        for name, value, ok, say in (
            ("explore", explore, 0 <= explore <= 1, "in [0, 1]"),
            ("max_unseen", max_unseen, max_unseen >= 1, "at least 1"),
            ("rest", rest, 0 <= rest < 1, "in [0, 1)"),
        ):
            if not ok:
                raise ValueError(f"MemoryOrder.{name} must be {say}; got {value!r}")
        size = len(ids)
        place = {name: i for i, name in enumerate(ids)}
        if len(place) < size:
            twice = next(name for i, name in enumerate(ids) if place[name] != i)
            raise ValueError(
                "screening with memory keeps results by prompt id, and two prompts "
                f"have the id {twice!r}"
            )
        self._ids, self._acceptance, self._seed, self._explore = (
            list(ids),
            acceptance,
            seed,
            explore,
        )
        self._bound, self._rest = int(max_unseen * size), int(rest * size)
        # Visit of the latest departure. Those before the start are distinct, which makes the order
        # at the start a shuffle.
        self._last = -1 - np.random.default_rng([KEY, seed, 0]).permutation(size)
        self._estimate, self._class = acceptance.look(self._ids)

    def pick(self, n: int, serial: int, out: np.ndarray) -> np.ndarray:
        rng = np.random.default_rng([KEY, self._seed, serial + 1])  # 0 made the shuffle
        by_age = np.argsort(self._last)  # seen least recently first
        # Oldest first from here on, number k would get visit serial + k, which its bound allows. If
        # it is passed over now, it gets visit serial + n + k - due at the latest. Prompts that are
        # out keep their place: they may be back by then.
        late = serial + n + np.arange(len(out)) - (self._last[by_age] + self._bound)
        waits = ~out[by_age]
        free = by_age[waits]
        due = free[: np.clip(late[waits].max(initial=0), 0, n)]
        free, n_free = free[len(due) :], min(n, len(free)) - len(due)
        oldest = free[: max(int(OLDEST * len(free)), n_free)]
        explored = rng.choice(oldest, rng.binomial(n_free, self._explore), replace=False)
        free = free[~np.isin(free, explored)]
        n_best = n_free - len(explored)
        rested = free[: max(int((serial - self._last[free] >= self._rest).sum()), n_best)]
        chance = self._acceptance.draw(self._class[rested], rng)
        # Among equals, the one seen least recently.
        best = rested[np.argsort(-chance, kind="stable")[:n_best]]
        chosen = np.concatenate([due, explored, best])
        self._last[chosen] = serial + np.arange(len(chosen))
        return chosen

    def observe(
        self,
        index: Sequence[int],
        positive: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float] = (),
    ) -> None:
        del tokens
        ids = [self._ids[i] for i in index]
        self._acceptance.update(ids, positive, total)
        index = np.asarray(index, np.int64)
        self._estimate[index], self._class[index] = self._acceptance.look(ids)

    def metrics(self, serial: int) -> dict[str, float]:
        """Epochs (visits / size) for which the prompt seen least recently has been unseen;
        posterior mean pass rate of all.
        """
        return {
            "prompts/unseen_max": (serial - 1 - max(self._last.min(), -1)) / len(self._ids),
            "prompts/estimate_mean": float(self._estimate.mean()),
        }

    def state_dict(self) -> dict[str, Any]:
        """Departures i64[size], and what came back."""
        return {"last": self._last.copy(), "acceptance": self._acceptance.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last = np.array(state["last"], np.int64)
        self._acceptance.load_state_dict(state["acceptance"])
        self._estimate, self._class = self._acceptance.look(self._ids)


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
        self.forecast, self._seed, self._explore, self._rest = forecast, seed, explore, rest * size
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
        tried, free = free[:explored], free[explored:]
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
