"""The host driver: runs a sampling rule between generation calls, with pre-fetch and a buffer (SPEED, Algorithm 2).

One call holds the next samples of every prompt in flight (continuations, tagged by the rule's phase, never inferred from
counts) and the first samples of prompts that are new. After scoring, the rule is asked about each prompt whose samples are
all done: it stays in flight, is rejected (counted), or is complete and its group waits in the buffer. A training step
takes `groups` of them. Nothing is dropped silently: what leaves the stream ends trained, rejected, expired, or is held.

With `depth` d the host scores call k while the devices generate call k + d: a call is dispatched, and then the oldest of more
than d is scored. Which call is scored when follows from counts alone, never from what is ready: runs repeat, and resume, bit
for bit. The price is age: with a call a step, what is trained on is d updates old, and the screening samples of two-phase rules
2d + 1 (so 1 at depth 0). They say so: `versions` is that of the dispatch.

Between two calls of a step its state is as whole as between two steps: it can be stopped there, saved, and gone on with, by another
process too, and draws and returns what it would have.
"""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rl_speed.config import Driver as DriverConfig
from rl_speed.data.prompts import Prompt, PromptStream
from rl_speed.rollout.buffer import BufferFull, SamplingBuffer
from rl_speed.data.group import Group, pack, unpack
from rl_speed.sampling import ACCEPTED, COMPLETE, REJECTED, SCREENING, Counts, Rule, RuleState, compiled_decide
from rl_speed.rollout.generate import Drawn, GenerationStats, Generator, Work
from rl_speed.rollout.budgets import Budgets, pack_visits, unpack_visits
from rl_speed.rollout.in_flight import (Flight, PendingCall, make_flights, pack_cached, rule_columns, to_group,
                                       unpack_cached)
from rl_speed.replay.source import PrefixSource
from rl_speed.rollout.screening import Screening
from rl_speed.rollout.tally import StarvedError, StepReport, Tally, broken_samples, load_tally

# (prompts, one per sample; samples) -> (rewards f32[n], correct bool[n])
Scorer = Callable[[Sequence[Prompt], Drawn], tuple[np.ndarray, np.ndarray]]


class HostDriver:
    """See the module's docstring.

    Args:
      rule: the sampling rule. stream: prompts. generator: the sampler, with capacities `capacities(rule, config)`.
      score: the verifier. buffer: complete groups wait here. config: how many to screen, pre-fetch, limits.
      budgets, prefixes: as of `Screening`.

    Attributes:
      screening: what became of prompts, and what is known of those to come.
    """

    def __init__(self, rule: Rule, stream: PromptStream, generator: Generator, score: Scorer, buffer: SamplingBuffer,
                 config: DriverConfig, budgets: Budgets | None = None, prefixes: PrefixSource | None = None):
        self.screening = Screening(stream, budgets, prefixes)
        self._begun: tuple[Tally, StepReport] | None = None  # a step that was stopped: the tally before it, what it did so far
        self.rule, self.stream, self.buffer, self.config = rule, stream, buffer, config
        self._generate, self._score, self._decide = generator.dispatch, score, compiled_decide(rule)
        self._capacity = capacities(rule, config)[0]
        self._flights: list[Flight] = []  # with all that was launched for them scored
        self._pending: deque[PendingCall] = deque()  # in order of dispatch
        self._two_phase = rule.first_samples < rule.max_samples

    @property
    def tally(self) -> Tally:
        """Prompts by fate."""
        return self.screening.tally

    @property
    def acceptance(self) -> float:
        """Estimated share of screened prompts that the rule accepts."""
        return self.screening.acceptance

    @property
    def in_flight(self) -> int:
        """Prompts whose samples are not all in, or not all scored."""
        return len(self._flights) + sum(len(call.flights) for call in self._pending)

    def next_groups(self, params: Any, version: int, stop: Callable[[], bool] = lambda: False) -> tuple[list[Group], StepReport]:
        """Generate until `groups` complete groups are held, and take them. A step that `stop` ended goes on.

        Args:
          params: the policy's weights; with `depth`, not to be donated before `wait` returned.
          version: policy updates made so far; stored with every sample whose call is dispatched now.
          stop: asked before each generation call. Once it says so, no more is dispatched.

        Returns:
          The groups (fewer, and `short` says by how many, when `max_calls` calls did not suffice) and a report. No groups where
          `stop` ended the step; what it drew is kept for the next call of this method, in `state_dict` too.

        Raises:
          StarvedError: `max_calls` calls brought no complete group at all.
        """
        if self._begun is None:
            self._begun = dataclasses.replace(self.tally), StepReport(GenerationStats(), 0.0, 0.0, 0, 0, 0, 0)
            self._expire(version)
        start, report = self._begun
        while len(self.buffer) < self.config.groups and report.generation.calls < self.config.max_calls:
            if stop():
                return [], report
            if not self._dispatch(params, version, report):
                if not self._pending:
                    raise RuntimeError("the sampling buffer is full and nothing is in flight: config.driver.buffer_groups is too "
                                       "small")
                self._collect(version, report)
            while len(self._pending) > self.config.depth:  # more than one only where a run goes on with a smaller depth
                self._collect(version, report)
        self._begun = None
        count = min(self.config.groups, len(self.buffer))
        if count == 0:
            raise StarvedError(
                f"no prompt completed in {report.generation.calls} generation calls ({self.tally.screened - start.screened} "
                f"screened, {self.tally.rejected - start.rejected} rejected, of these "
                f"{self.tally.failed - start.failed} never solved and {self.tally.solved - start.solved} always solved). "
                "The data is too hard or too easy for this policy and rule: widen config.rule.low/high, raise "
                f"config.rule.n_init or config.driver.max_calls, or change the data{broken_samples(report.generation)}")
        report.short = self.config.groups - count
        report.screened = self.tally.screened - start.screened
        report.rejected = self.tally.rejected - start.rejected
        self.screening.tell(params)
        return self.buffer.take(count), report

    def wait(self) -> None:
        """Block until the samples of all pending calls are on the host. Scores nothing."""
        for call in self._pending:
            call.draw.result()

    def _expire(self, version: int) -> None:
        """Let go of what is older than the buffer's `max_age`: complete groups, and flights that would become such."""
        self.tally.expired += len(self.buffer.expire(version))
        if (limit := self.buffer.max_age) is not None:
            young = [f for f in self._flights if version - f.group.oldest_version <= limit]
            self._observe([f.group for f in self._flights if version - f.group.oldest_version > limit])
            self.tally.lapsed += len(self._flights) - len(young)
            self._flights = young

    def _dispatch(self, params: Any, version: int, report: StepReport) -> bool:
        """Plan the next generation call and send it off. False where there is nothing to do for it."""
        going, waiting = self._to_continue()
        fresh = [Flight(p, None, SCREENING, 0, 0, 0) for p in self.stream.take(self._to_screen())]
        if not (active := going + fresh):
            return False
        self._begin(fresh, params)
        replay = lambda f: self.screening.replay(f.cached, f.prompt, f.launched, f.want - f.launched)
        work = [Work(f.prompt, f.launched, f.want - f.launched, replay(f)) for f in active]
        begin = time.perf_counter()
        self._pending.append(PendingCall(active, version, self._generate(params, work)))
        report.generate_s += time.perf_counter() - begin
        self.tally.screened += len(fresh)
        self._flights = waiting
        return True

    def _begin(self, fresh: Sequence[Flight], params: Any) -> None:
        """Give new prompts their budgets, what the rule wants of them first, and the responses that they start from."""
        budgets = None
        if (asked := self.screening.ask(params, [f.prompt for f in fresh])) is not None:
            estimates, budgets = asked
            for flight, estimate in zip(fresh, estimates.tolist()):
                flight.estimate = estimate
        for flight, budget in zip(fresh, self._ask(fresh, first=True, budgets=budgets)):
            flight.budget, flight.cached = budget, self.screening.cached(flight.prompt)

    def _collect(self, version: int, report: StepReport) -> None:
        """Score and judge the oldest pending call."""
        call = self._pending.popleft()
        begin = time.perf_counter()
        drawn, stats = call.draw.result()
        fresh = call.fresh
        middle = time.perf_counter()
        with self._beside_generation():
            self._take_in(call, drawn)
        report.generation += stats
        self.tally.nonfinite += stats.nonfinite
        report.generate_s += middle - begin
        report.score_s += time.perf_counter() - middle
        rates = {f.prompt.visit: float(f.group.correct.mean()) for f in fresh}
        accepted, cancelled = self._judge(call.flights)
        report.accepted += accepted
        report.pass_rates += [rate for visit, rate in rates.items() if visit not in cancelled]
        self._flights += [f for f in call.flights if f.group is not None]
        self._expire(version)  # updates may have been made since its dispatch

    def _beside_generation(self) -> contextlib.AbstractContextManager:
        """Where JAX computes what the host needs now: an accelerator would get to it after the calls it was given before."""
        if self.config.depth == 0:
            return contextlib.nullcontext()
        try:
            return jax.default_device(jax.local_devices(backend="cpu")[0])
        except RuntimeError:  # a process that was told to know no CPU backend: the same results, later
            return contextlib.nullcontext()

    def _room(self) -> int:
        """Groups that still fit into the buffer when all that can complete in pending calls has."""
        completing = (call.continued if self._two_phase else call.flights for call in self._pending)
        return self.buffer.free - sum(map(len, completing))

    def _to_continue(self) -> tuple[list[Flight], list[Flight]]:
        """(flights that this call continues, flights that wait), both in order of arrival.

        A flight whose next samples are its last goes only if its group is needed: drawn earlier, they would be more off-policy
        than they must be by the time they are trained on. With `depth`, every call under way should bring one batch. What
        completes must find room in the buffer.
        """
        config = self.config
        room = min(self._room(), self._capacity - config.screen_prompts)
        coming = sum(f.want >= self.rule.max_samples for call in self._pending for f in call.continued)
        # At most a batch a call: if the first took all there is, those after it would have nothing to generate while it is scored.
        needed = min(config.groups, config.groups * (1 + config.depth) - len(self.buffer) - coming)
        going, waiting = [], []
        for flight in self._flights:
            last = flight.want >= self.rule.max_samples
            if len(going) < room and (needed > 0 or not last):
                needed -= last
                going.append(flight)
            else:
                waiting.append(flight)
        return going, waiting

    def _to_screen(self) -> int:
        """How many new prompts this call screens."""
        config = self.config
        rate = max(self.acceptance, 1.0 / config.screen_prompts)
        # Groups that there will be of the prompts under way: those that passed, and what is expected of those being screened.
        coming = len(self._flights) + sum(len(call.continued) + rate * len(call.fresh) for call in self._pending)
        # What passes a first phase can wait in flight, so that any room at all allows a whole screening; what a single phase
        # completes must fit at once.
        room = config.screen_prompts * (self.buffer.free - coming > 0) if self._two_phase else self._room()
        room = max(0, min(config.screen_prompts, room))
        if config.screening == "fixed":
            return room
        # A two-phase rule with pre-fetch screens now for the step after this one.
        ahead = config.prefetch and self._two_phase and self.buffer.max_age != 0
        target = config.groups * (2 if ahead else 1)
        # So much again for every call ahead of scoring, but no single call takes it all on itself (as in `_to_continue`).
        missing = min(target, target * (1 + config.depth) - len(self.buffer) - coming)
        if missing < 1:
            return 0
        # Enough that `missing` are accepted with a margin of so many standard deviations of that number.
        spread = config.margin * math.sqrt(missing * (1.0 - min(rate, 1.0)))
        return min(room, math.ceil((missing + spread) / rate))

    def _ask(self, flights: Sequence[Flight], first: bool = False, budgets: np.ndarray | None = None) -> list[int]:
        """Put the rule's answer into the flights' want, phase, round; return status per flight (budget if `first`)."""
        size = max(self._capacity, len(flights))  # a call from a checkpoint may be larger than those of today
        column = lambda values: np.pad(np.asarray(values, np.int32), (0, size - len(flights)))
        launched = column([f.launched for f in flights])
        positive = column([0 if f.group is None else int(f.group.correct.sum()) for f in flights])
        with self._beside_generation():
            if first:
                state = self.rule.init(size, None if budgets is None else column(budgets))
            else:
                state = RuleState(*(column([getattr(f, name) for f in flights]) for name in ("phase", "round", "budget")))
            decision, state = self._decide(Counts(launched=launched, done=launched, positive=positive), state)
            want, status, phase, rounds, budget = map(np.asarray, (decision.want, decision.status, state.phase, state.round,
                                                                   state.budget))
        for i, flight in enumerate(flights):
            flight.want, flight.phase, flight.round = int(want[i]), int(phase[i]), int(rounds[i])
        return (budget if first else status)[:len(flights)].tolist()

    def _take_in(self, call: PendingCall, drawn: Sequence[Drawn]) -> None:
        """Score what came back, in one go, and add it to the flights' groups."""
        flat = Drawn(*(np.concatenate([getattr(d, f.name) for d in drawn]) for f in dataclasses.fields(Drawn)))
        owners = [f.prompt for f, d in zip(call.flights, drawn) for _ in range(len(d.lengths))]
        rewards, correct = self._score(owners, flat)
        # What was said before the policy broke down earns nothing, whatever the scorer makes of it.
        rewards, correct = np.where(flat.nonfinite, 0, rewards), np.asarray(correct, bool) & ~flat.nonfinite
        row = 0
        for flight, d in zip(call.flights, drawn):
            n = len(d.lengths)
            group = to_group(flight, d, call.version, rewards[row:row + n], correct[row:row + n])
            flight.group = group if flight.group is None else flight.group.merge(group)
            flight.finished = int(d.end_step.max())
            row += n

    def _judge(self, active: Sequence[Flight]) -> tuple[int, set[int]]:
        """Ask the rule about prompts whose samples are all in; sort them into buffer, flight or rejected.

        In order of completion, those still running when the batch was full count as never begun: they go back to the stream.
        A flight that ended is left with no group. Returns (how many passed their screening, visits of those that went back).
        """
        room = len(active)
        if self.config.accept == "completion":
            active, room = sorted(active, key=lambda f: f.finished), self.config.groups - len(self.buffer)
        before = [f.phase for f in active]
        complete, decided, cancelled, accepted = [], [], [], 0
        for flight, phase, status in zip(active, before, self._ask(active)):
            if len(complete) == room:
                cancelled.append(flight.prompt)
                self.tally.cancelled_tokens += flight.group.sampled_tokens
                flight.group = None
                continue
            passed = status == COMPLETE or flight.phase == ACCEPTED
            if phase == SCREENING and (passed or status == REJECTED):
                self.screening.judged([passed])
                accepted += passed
            if status == COMPLETE:
                complete.append(flight.group)
                self.tally.completed += 1
            elif status == REJECTED:
                self.tally.rejected += 1
                self.tally.solved += bool(flight.group.correct.all())
                self.tally.failed += not flight.group.correct.any()
                self.tally.rejected_tokens += flight.group.sampled_tokens
            else:
                continue
            decided.append(flight.group)
            flight.group = None
        self.buffer.add(complete)
        self._observe(decided)
        self.stream.put_back(cancelled)
        self.tally.screened -= len(cancelled)
        return accepted, {prompt.visit for prompt in cancelled}

    def _observe(self, groups: Sequence[Group]) -> None:
        """Note what became of prompts that this driver is done with."""
        self.screening.observe([g.prompt for g in groups], [int(g.correct.sum()) for g in groups], [len(g) for g in groups])

    def metrics(self, version: int) -> dict[str, float]:
        """Those of the buffer and of the estimates, and how many calls are generated, or being generated, and not yet scored."""
        return {"pending_calls": float(len(self._pending)), **self.buffer.metrics(version), **self.screening.metrics(version)}

    def state_dict(self) -> dict[str, Any]:
        """Flights, pending calls and the buffer with their samples, the tally and the acceptance estimate, and a step that was
        stopped; the stream saves itself. Blocks until the samples of pending calls are there."""
        begun = {}
        if self._begun is not None:
            begun["begun"] = {"tally": dataclasses.asdict(self._begun[0]), "report": self._begun[1].state_dict(),
                              "news": pack_visits(self.screening.news)}
        return {**begun, "flights": pack([f.group for f in self._flights]), "rule": rule_columns(self._flights),
                "pending": {str(i): call.state_dict() for i, call in enumerate(self._pending)},
                "buffer": self.buffer.state_dict(), **self.screening.state_dict(),
                **({} if self.screening.prefixes is None else {"cached": pack_cached(self._flights)})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken. The depth may be another one now.

        Raises:
          BufferFull: the buffer is smaller now, and has no room for what it held, or for what pending calls may complete.
        """
        groups, pending = unpack(state["flights"]), state.get("pending", {})  # a state from before there was a depth has none
        self._flights = make_flights([g.prompt for g in groups], groups, state["rule"])
        self._pending = deque(PendingCall.from_state_dict(pending[str(i)]) for i in range(len(pending)))
        self.buffer.load_state_dict(state["buffer"])
        if self._room() < 0:
            raise BufferFull(f"config.driver.buffer_groups ({self.buffer.capacity}) is {-self._room()} too small for the saved "
                             "groups and those that the saved generation calls may complete")
        self.screening.load_state_dict(state)
        self._begun = None
        if "begun" in state:
            self._begun = load_tally(state["begun"]["tally"]), StepReport.from_state_dict(state["begun"]["report"])
            self.screening.news = unpack_visits(state["begun"]["news"])
        if self.screening.prefixes is not None and "cached" in state:
            unpack_cached(self._flights, state["cached"])


def capacities(rule: Rule, config: DriverConfig) -> tuple[int, int]:
    """(prompts, samples) that one generation call must be able to hold.

    New prompts are at most `screen_prompts`, and so are those in flight, which came through an earlier call's screening;
    none are where the first samples are all there is. Flights beyond these numbers wait.
    """
    in_flight = 0 if rule.first_samples == rule.max_samples else min(config.buffer_groups, config.screen_prompts)
    prompts = in_flight + config.screen_prompts
    return prompts, in_flight * (rule.max_samples - rule.first_samples) + config.screen_prompts * rule.first_samples
