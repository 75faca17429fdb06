"""Continuous batching: a thread prefills waiting prompts into free slots and decodes all slots
together.
"""

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rl_speed.serving.engine import Draws, Engine, Step, seed_key

_LOG = logging.getLogger(__name__)


class Full(RuntimeError):
    """The queue has no room for the request; it may be sent again later."""


class Stopped(RuntimeError):
    """The server is shutting down."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of a response.

    Attributes:
      logprob: log-prob at temperature 1. top: [(id, log-prob)], descending. Both are None unless
        the response has `logprobs`.
      finish: "stop" for an end token, "length" at the response's limit, else None.
    """

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] | None = None
    finish: str | None = None


@dataclasses.dataclass(eq=False)
class Response:
    """A response to draw. Consecutive responses to one prompt share its prefill.

    Attributes:
      prompt: token ids. limit: most tokens of the response. seed, index: key of its randomness.
      logprobs: whether tokens have log-probs. tag: any value of the caller.
      ended: set by the batcher with the last event. cancelled: set by `Batcher.cancel`.
    """

    prompt: list[int]
    limit: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    index: int = 0
    logprobs: bool = False
    tag: Any = None
    ended: bool = False
    cancelled: bool = False


Event = Token | Exception
Events = list[tuple[Response, Event]]


class Batcher:
    """Draws responses in the engine's slots, in its own thread.

    A response's tokens depend on its prompt, settings, seed and index, not on other responses. One
    decode step runs ahead of the delivered tokens.

    Args:
      engine: engine with one sample per slot; the first responses compile it unless `warm_up` did.
      deliver: called from the thread with the events of a step. A response's last event is a token
        with `finish`, or an exception.
      room: most responses that wait for a slot.

    Attributes:
      ended: Stopped, or the error that ended the thread; None while it runs.
    """

    def __init__(self, engine: Engine, deliver: Callable[[Events], None], room: int):
        self._engine = engine
        self._deliver = deliver
        self.room = room
        self._waiting: collections.deque[Response] = collections.deque()
        self._tenants: dict[int, Response] = {}
        self._changed = threading.Condition()
        self.ended: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> tuple[int, int]:
        """(responses in slots, waiting responses)."""
        return len(self._tenants), len(self._waiting)

    def submit(self, responses: Sequence[Response]) -> None:
        """Queue all of these responses, or none.

        Raises Full if they do not all fit, or `ended` if the thread has ended.
        """
        with self._changed:
            if self.ended is not None:
                raise self.ended
            waiting = sum(not response.cancelled for response in self._waiting)
            if waiting + len(responses) > self.room:
                raise Full(
                    f"the queue holds {waiting} of {self.room} responses, and this request needs "
                    f"{len(responses)}; try again later"
                )
            self._waiting.extend(responses)
            self._changed.notify()

    def cancel(self, response: Response) -> None:
        """Free the response's slot; it gets no more events from later steps."""
        response.cancelled = True

    def stop(self) -> None:
        """End the thread; unfinished responses get Stopped."""
        with self._changed:
            self.ended = self.ended or Stopped("the server is shutting down")
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            _LOG.exception("decoding failed; the server accepts no more requests")
            self.ended = RuntimeError(f"decoding failed: {type(error).__name__}: {error}")
        with self._changed:
            left = [*self._tenants.values(), *self._waiting]
            self._tenants.clear()
            self._waiting.clear()
        self._send([(r, self.ended) for r in left if not r.cancelled])

    def _serve(self) -> None:
        engine = self._engine
        tenants = self._tenants
        state = engine.init_state()
        prompt = None
        prefix = None
        under_way: tuple[Step, dict[int, Response]] | None = None
        while True:
            admitted = self._admit(idle=under_way is None)
            if self.ended is not None:
                return
            for slot, response in admitted:
                if response.prompt is not prompt:
                    prompt = response.prompt
                    prefix = engine.prefill(response.prompt)
                draws = Draws(
                    seed_key(response.seed, response.index),
                    response.temperature,
                    response.top_p,
                    response.limit,
                )
                state = engine.insert(state, prefix, slot, draws=draws)
            done = under_way
            under_way = None
            if tenants:
                logprobs = any(response.logprobs for response in tenants.values())
                state, step = engine.generate(state, logprobs)
                under_way = step, dict(tenants)
            else:
                prompt = None
                prefix = None
            if done is not None:
                self._send(self._events(*done))

    def _admit(self, idle: bool) -> list[tuple[int, Response]]:
        """Free slots of cancelled responses and fill free slots; if `idle`, wait for work."""
        with self._changed:
            while True:
                for slot in [s for s, response in self._tenants.items() if response.cancelled]:
                    del self._tenants[slot]
                admitted = []
                for slot in sorted(set(range(self._engine.slots)) - set(self._tenants)):
                    while self._waiting and self._waiting[0].cancelled:
                        self._waiting.popleft()
                    if self._waiting:
                        self._tenants[slot] = self._waiting.popleft()
                        admitted.append((slot, self._tenants[slot]))
                if self._tenants or not idle or self.ended is not None:
                    return admitted
                self._changed.wait()

    def _events(self, step: Step, rows: dict[int, Response]) -> Events:
        """Returns the events of a step that was dispatched for `rows`."""
        step = jax.tree.map(np.asarray, step)
        events = []
        for row, response in rows.items():
            if response.cancelled or response.ended:
                continue
            token, valid, length = map(int, step.data[row])
            if not valid:
                event: Event = RuntimeError(
                    f"the logits of token {length + 1} are NaN or infinite; check the policy's "
                    "weights"
                )
            else:
                is_end = token in self._engine.config.end_tokens
                finish = "stop" if is_end else "length" if length >= response.limit else None
                event = Token(token, finish=finish)
                if response.logprobs:
                    top = zip(step.top_tokens[row].tolist(), step.top_logprobs[row].tolist())
                    event = Token(token, float(step.logprob[row]), list(top), finish)
            if isinstance(event, Exception) or event.finish:
                response.ended = True
                if self._tenants.get(row) is response:
                    del self._tenants[row]
            events.append((response, event))
        return events

    def _send(self, events: Events) -> None:
        if events:
            self._deliver(events)
