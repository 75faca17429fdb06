"""What the host driver has under way: prompts in flight, and generation calls whose samples are not scored yet."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_speed.data.prompts import Prompt
from rl_speed.data.group import Group, pack, unpack
from rl_speed.replay.responses import CachedResponse, pack_responses, unpack_responses
from rl_speed.rollout.generate import Draw, Drawn, FinishedDraw, GenerationStats


@dataclasses.dataclass
class Flight:
    """A prompt whose samples are not all in: what it has, what the rule remembers of it, how many it should get."""

    prompt: Prompt
    group: Group | None
    phase: int
    round: int
    budget: int
    want: int
    estimate: float = float("nan")  # of the pass rate, before the visit
    finished: int = 0  # decode step of its latest call at which its last sample ended
    cached: CachedResponse | None = None  # that its samples start inside of; the one its visit began with

    @property
    def launched(self) -> int:
        return 0 if self.group is None else len(self.group)


def rule_columns(flights: Sequence[Flight]) -> np.ndarray:
    """i32[4F]: what is saved of flights beside their groups."""
    return np.asarray([[f.phase, f.round, f.budget, f.want] for f in flights], np.int32).reshape(-1)


def make_flights(prompts: Sequence[Prompt], groups: Sequence[Group | None], columns: np.ndarray) -> list[Flight]:
    """The inverse of `rule_columns`."""
    rows = np.asarray(columns, np.int64).reshape(-1, 4).tolist()
    known = [float("nan") if group is None else float(group.estimates[0]) for group in groups]
    return [Flight(prompt, group, *row, estimate=p) for prompt, group, row, p in zip(prompts, groups, rows, known, strict=True)]


def to_group(flight: Flight, drawn: Drawn, version: int, rewards: np.ndarray, correct: np.ndarray) -> Group:
    """The samples drawn for a flight by policy `version`, with rewards f32[n] and verdicts bool[n]."""
    n = len(drawn.lengths)
    return Group(prompt=flight.prompt, tokens=drawn.tokens, lengths=drawn.lengths, logprobs=drawn.logprobs, rewards=rewards,
                 versions=np.full(n, version), phases=np.full(n, flight.phase),
                 sample_index=np.arange(flight.launched, flight.launched + n), truncated=drawn.truncated, correct=correct,
                 estimates=np.full(n, flight.estimate), prefix=drawn.prefix, nonfinite=drawn.nonfinite)


def pack_cached(flights: Sequence[Flight]) -> dict[str, Any]:
    """The responses that flights started from, by their place."""
    return pack_responses({str(i): f.cached for i, f in enumerate(flights) if f.cached is not None})


def unpack_cached(flights: Sequence[Flight], packed: dict[str, Any]) -> None:
    """Give the flights back what `pack_cached` saved."""
    for place, response in unpack_responses(packed).items():
        flights[int(place)].cached = response


@dataclasses.dataclass
class PendingCall:
    """A generation call between its dispatch and its scoring. Its flights are nobody else's until then.

    Attributes:
      flights: whom it draws for, in the order of its work: continuations, then `fresh` prompts, which have no group yet.
      version: policy updates made when it was dispatched. draw: its samples, when they are there.
    """

    flights: list[Flight]
    version: int
    draw: Draw

    @property
    def fresh(self) -> list[Flight]:
        """Those that get their first samples."""
        return [f for f in self.flights if f.group is None]

    @property
    def continued(self) -> list[Flight]:
        """Those that had samples before."""
        return [f for f in self.flights if f.group is not None]

    def state_dict(self) -> dict[str, Any]:
        """Flights and samples, the latter packed as groups that nobody has scored. Blocks until the samples are there."""
        drawn, stats = self.draw.result()
        unscored = [to_group(f, d, self.version, np.zeros(len(d.lengths)), np.zeros(len(d.lengths), bool))
                    for f, d in zip(self.flights, drawn, strict=True)]
        return {"groups": pack([f.group for f in self.continued]), "drawn": pack(unscored), "rule": rule_columns(self.flights),
                "cached": pack_cached(self.flights), "version": self.version, "stats": dataclasses.asdict(stats)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "PendingCall":
        """The inverse; its samples are there already."""
        groups, unscored = unpack(state["groups"]), unpack(state["drawn"])
        flights = make_flights([g.prompt for g in unscored], groups + [None] * (len(unscored) - len(groups)), state["rule"])
        for flight, group in zip(flights, unscored):
            flight.estimate = float(group.estimates[0])
        unpack_cached(flights, state.get("cached", {}))
        drawn = [Drawn(g.tokens, g.logprobs, g.lengths, g.truncated, g.prefix, nonfinite=g.nonfinite) for g in unscored]
        stats = GenerationStats(**{name: int(value) for name, value in state["stats"].items()})
        return cls(flights, int(state["version"]), FinishedDraw(drawn, stats))
