"""Whom the next generation call of the host driver draws for: how many prompts go on,
and how many new ones are screened.
"""

import math
from collections.abc import Collection, Sequence

from rl_speed.config import Driver as DriverConfig
from rl_speed.rollout.buffer import SamplingBuffer
from rl_speed.rollout.in_flight import ActivePrompt, PendingCall
from rl_speed.sampling import Rule, two_phase


class CallPlan:
    """Every number follows from counts alone.

    Prompts in flight and pending calls are those of the driver.

    Attributes:
      capacity: prompts that a call can hold.
    """

    def __init__(self, rule: Rule, config: DriverConfig):
        self._last = rule.max_samples
        self._config = config
        self.capacity = capacities(rule, config)[0]
        self._two_phase = two_phase(rule)
        # Whether new prompts may complete in their first call.
        self._at_once = rule.first_samples >= rule.max_samples

    def room(self, pending: Collection[PendingCall], buffer: SamplingBuffer) -> int:
        """Groups that still fit into the buffer when all that can complete in pending calls has."""
        return buffer.free - sum(
            len(call.active if self._at_once else call.continued) for call in pending
        )

    def to_continue(
        self,
        active: Sequence[ActivePrompt],
        pending: Collection[PendingCall],
        buffer: SamplingBuffer,
    ) -> tuple[list[ActivePrompt], list[ActivePrompt]]:
        """(prompts that this call continues, prompts that wait), both in order of arrival.

        A prompt whose next samples are its last goes only if its group is needed: drawn earlier,
        they would be more off-policy than they must be by the time they are trained on. With
        `depth`, every call under way should bring one batch. With `continuation="at_once"` all go.
        What completes must find room in the buffer.
        """
        config = self._config
        room = min(self.room(pending, buffer), self.capacity - config.screen_prompts)
        coming = sum(a.want >= self._last for call in pending for a in call.continued)
        # At most a batch a call: if the first took all there is, those after it would have nothing
        # to generate while it is scored.
        needed = min(config.groups, config.groups * (1 + config.depth) - len(buffer) - coming)
        going = []
        waiting = []
        for prompt in active:
            last = prompt.want >= self._last
            if len(going) < room and (needed > 0 or not last or config.continuation == "at_once"):
                needed -= last
                going.append(prompt)
            else:
                waiting.append(prompt)
        return going, waiting

    def to_screen(
        self,
        active: Sequence[ActivePrompt],
        pending: Collection[PendingCall],
        buffer: SamplingBuffer,
        acceptance: float,
    ) -> int:
        """How many new prompts this call screens.

        `acceptance`: the estimated share of them that the rule accepts.
        """
        config = self._config
        rate = max(acceptance, 1.0 / config.screen_prompts)
        # Groups that there will be of the prompts under way: those that passed, and what is
        # expected of those being screened.
        coming = len(active) + sum(len(call.continued) + rate * len(call.fresh) for call in pending)
        # What passes a first phase can wait in flight, so that any room at all allows a whole
        # screening; what a single phase completes must fit at once, beside what goes on.
        room = (
            self.room(pending, buffer) - len(active)
            if self._at_once
            else config.screen_prompts * (buffer.free - coming > 0)
        )
        room = max(0, min(config.screen_prompts, room))
        if config.screening == "fixed":
            return room
        # A two-phase rule with pre-fetch screens now for the step after this one.
        ahead = config.prefetch and self._two_phase and buffer.max_age != 0
        target = config.groups * (2 if ahead else 1)
        # So much again for every call ahead of scoring, but no single call takes it all on itself
        # (as in `to_continue`).
        missing = min(target, target * (1 + config.depth) - len(buffer) - coming)
        if missing < 1:
            return 0
        # Enough that `missing` are accepted with a margin of so many standard deviations of
        # that number.
        spread = config.margin * math.sqrt(missing * (1.0 - min(rate, 1.0)))
        return min(room, math.ceil((missing + spread) / rate))


def capacities(rule: Rule, config: DriverConfig) -> tuple[int, int]:
    """(prompts, samples) that one generation call must be able to hold.

    New prompts are at most `screen_prompts`, and so are those in flight, which came through an
    earlier call's screening; none are where the first samples are all there is. Prompts beyond
    these numbers wait.
    """
    in_flight = min(config.buffer_groups, config.screen_prompts) if two_phase(rule) else 0
    prompts = in_flight + config.screen_prompts
    least = getattr(rule, "least_first_samples", rule.first_samples)
    samples = in_flight * (rule.max_samples - least) + config.screen_prompts * rule.first_samples
    return prompts, samples
