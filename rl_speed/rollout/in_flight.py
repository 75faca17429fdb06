"""Prompts in flight, and generation calls whose samples are not scored yet."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_speed.data.prompts import Prompt
from rl_speed.data.rollouts import Rollouts, pack, unpack
from rl_speed.replay.responses import CachedResponse, pack_responses, unpack_responses
from rl_speed.rollout.generate import CallStopped, GenerationStats, PendingRollouts


@dataclasses.dataclass
class ActivePrompt:
    """A prompt in flight: its samples so far, the rule's state for it, and the samples it should
    get.
    """

    prompt: Prompt
    group: Rollouts | None
    phase: int
    round: int
    budget: int
    want: int
    estimate: float = float("nan")  # of the pass rate, before the visit
    finished: int = 0  # decode step of its latest call at which its last sample ended
    # Response whose prefix its samples replay; fixed when the visit starts.
    cached: CachedResponse | None = None

    @property
    def launched(self) -> int:
        return 0 if self.group is None else len(self.group)


def rule_columns(active: Sequence[ActivePrompt]) -> np.ndarray:
    """i32[4A]: the rule's state of prompts in flight, saved beside their groups."""
    return np.asarray([[a.phase, a.round, a.budget, a.want] for a in active], np.int32).reshape(-1)


def make_active(
    prompts: Sequence[Prompt], groups: Sequence[Rollouts | None], columns: np.ndarray
) -> list[ActivePrompt]:
    """Inverse of `rule_columns`."""
    rows = np.asarray(columns, np.int64).reshape(-1, 4).tolist()
    known = [float("nan") if group is None else float(group.estimates[0]) for group in groups]
    return [
        ActivePrompt(prompt, group, *row, estimate=estimate)
        for prompt, group, row, estimate in zip(prompts, groups, rows, known, strict=True)
    ]


def pack_cached(active: Sequence[ActivePrompt]) -> dict[str, Any]:
    """Packs the replayed responses of prompts in flight, by their place."""
    return pack_responses({str(i): a.cached for i, a in enumerate(active) if a.cached is not None})


def unpack_cached(active: Sequence[ActivePrompt], packed: dict[str, Any]) -> None:
    """Restores the responses that `pack_cached` saved."""
    for place, response in unpack_responses(packed).items():
        active[int(place)].cached = response


@dataclasses.dataclass
class PendingCall:
    """A generation call between its dispatch and its scoring.

    Until then its prompts belong to no other call.

    Attributes:
      active: its prompts, in the order of its requests: continuations, then `fresh` prompts, which
        have no group yet.
      version: policy updates made when it was dispatched. pending: its samples, once drawn. None:
        `Generator.stop` ended it; it must be made again with the same weights. expected: expected
        lengths of its requests (`SampleRequest`).
    """

    active: list[ActivePrompt]
    version: int
    pending: PendingRollouts | None
    expected: list[float] = dataclasses.field(default_factory=list)

    @property
    def fresh(self) -> list[ActivePrompt]:
        """Prompts that get their first samples."""
        return [a for a in self.active if a.group is None]

    @property
    def continued(self) -> list[ActivePrompt]:
        """Prompts that had samples before."""
        return [a for a in self.active if a.group is not None]

    def result(self) -> tuple[Rollouts, GenerationStats]:
        """Unscored samples, with the call's versions, phases and estimates.

        Blocks until they are there. Raises CallStopped if the call must be made again.
        """
        if self.pending is None:
            raise CallStopped
        try:
            rollouts, stats = self.pending.result()
        except CallStopped:
            self.pending = None
            raise

        def column(values):
            return np.asarray(values)[rollouts.owner]

        return dataclasses.replace(
            rollouts,
            versions=np.full(len(rollouts), self.version),
            phases=column([a.phase for a in self.active]),
            estimates=column([a.estimate for a in self.active]),
        ), stats

    def state_dict(self) -> dict[str, Any]:
        """Prompts, and samples as unscored groups.

        Blocks until the samples are there. A call that must be made again saves samples without
        tokens in place of its prompts.
        """
        again = {}
        try:
            rollouts, stats = self.result()
        except CallStopped:
            count = len(self.active)
            tokens = np.zeros((count, 1))
            rollouts = Rollouts(
                [a.prompt for a in self.active],
                np.arange(count),
                tokens,
                lengths=np.zeros(count),
                logprobs=tokens,
                sample_index=np.zeros(count),
                truncated=np.zeros(count),
                estimates=np.array([a.estimate for a in self.active]),
            )
            stats = GenerationStats()
            again = {"again": np.asarray(self.expected, np.float64)}
        return {
            **again,
            "groups": pack([a.group for a in self.continued]),
            "drawn": pack(rollouts.groups()),
            "rule": rule_columns(self.active),
            "cached": pack_cached(self.active),
            "version": self.version,
            "stats": dataclasses.asdict(stats),
        }

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "PendingCall":
        """Inverse of `state_dict`; its samples are there already, or must be drawn again."""
        groups = unpack(state["groups"])
        unscored = unpack(state["drawn"])
        active = make_active(
            [g.prompt for g in unscored],
            groups + [None] * (len(unscored) - len(groups)),
            state["rule"],
        )
        for prompt, group in zip(active, unscored):
            prompt.estimate = float(group.estimates[0])
        unpack_cached(active, state["cached"])
        stats = GenerationStats(**{name: int(value) for name, value in state["stats"].items()})
        if "again" in state:
            return cls(active, int(state["version"]), None, state["again"].tolist())
        finished = Rollouts.concat(unscored), stats
        return cls(active, int(state["version"]), PendingRollouts(lambda: finished))
