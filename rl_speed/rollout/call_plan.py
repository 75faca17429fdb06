"""Chooses the prompts of the next generation call: how many continue, how many new ones are
screened.
"""

import math
from collections.abc import Collection, Sequence

from rl_speed.config import Driver as DriverConfig
from rl_speed.rollout.buffer import SamplingBuffer
from rl_speed.rollout.in_flight import ActivePrompt, PendingCall
from rl_speed.sampling import Rule, two_phase


class CallPlan:
    """Plans generation calls from counts alone.

    The driver passes its prompts in flight and its pending calls.

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
        """Groups that still fit into the buffer if every prompt that can complete in a pending call
        does.
        """
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

        A prompt that needs its last samples continues only if the step needs its group: samples
        drawn earlier would be more off-policy when they are trained on. With `depth`, every pending
        call should bring one batch. With `continuation="at_once"` all continue. Groups that
        complete must fit into the buffer.
        """
        config = self._config
        room = min(self.room(pending, buffer), self.capacity - config.screen_prompts)
        coming = sum(a.want >= self._last for call in pending for a in call.continued)
        # At most one batch a call: if the first call took all prompts, later calls would have
        # nothing to generate while it is scored.
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
        """Number of new prompts that this call screens.

        `acceptance`: the estimated share of them that the rule accepts.
        """
        config = self._config
        rate = max(acceptance, 1.0 / config.screen_prompts)
        # Groups expected from prompts under way: those that passed screening, and the expected
        # share of those being screened.
        coming = len(active) + sum(len(call.continued) + rate * len(call.fresh) for call in pending)
        # With two phases, prompts that pass can wait in flight, so any free place allows a whole
        # screening. With one phase, completed groups must fit at once, beside those of continued
        # prompts.
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
        # Adds one target for every call ahead of scoring; no single call screens for more than one
        # (as in `to_continue`).
        missing = min(target, target * (1 + config.depth) - len(buffer) - coming)
        if missing < 1:
            return 0
        # `margin` standard deviations of the number accepted.
        spread = config.margin * math.sqrt(missing * (1.0 - min(rate, 1.0)))
        return min(room, math.ceil((missing + spread) / rate))


def capacities(rule: Rule, config: DriverConfig) -> tuple[int, int]:
    """(prompts, samples) that one generation call must be able to hold.

    At most `screen_prompts` new prompts and `screen_prompts` in flight, which passed the screening
    of an earlier call. Single-phase rules have none in flight. Prompts beyond these numbers wait.
    """
    in_flight = min(config.buffer_groups, config.screen_prompts) if two_phase(rule) else 0
    prompts = in_flight + config.screen_prompts
    least = getattr(rule, "least_first_samples", rule.first_samples)
    samples = in_flight * (rule.max_samples - least) + config.screen_prompts * rule.first_samples
    return prompts, samples
