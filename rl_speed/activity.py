"""What this process is doing now, in words, for progress bars and logs.

There is one for the process, as there is one root logger: whoever begins what may take minutes says
so, and need not know who shows it. It decides nothing.
"""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax

# What is compiled for a phase, where that is called otherwise.
_COMPILED = {
    "generating": "generation",
    "scoring": "scoring",
    "updating": "the update",
    "evaluating": "evaluation",
    "sending weights": "the transfer of weights",
}
_COMPILE = "/jax/core/compile/"


class _Phase(NamedTuple):
    name: str
    part: str
    since: float


class Activity:
    """The innermost phase under way, how far its generation call is, and compilation.

    `counting` phases show the counts of generation calls, which other threads may make.
    """

    def __init__(self):
        self._phases: list[_Phase] = []
        self._counts = ""
        self._compiling, self._since = 0, 0.0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def phase(self, name: str, part: str = "") -> Iterator[None]:
        """Within, this is what the process does: "generating", part "call 1"."""
        self._phases.append(_Phase(name, part, time.monotonic()))
        try:
            yield
        finally:
            self._phases.pop()

    def count(self, done: int, total: int) -> None:
        """A generation call has so many of its responses."""
        self._counts = f"{done:,} of {total:,} responses"

    def watch_compilation(self) -> None:
        """Notice what JAX compiles from now on, in any thread."""
        jax.monitoring.register_scalar_listener(self._begins)
        jax.monitoring.register_event_duration_secs_listener(self._ends)

    def _begins(self, event: str, value: float, **_) -> None:
        if event.startswith(_COMPILE):
            with self._lock:
                if self._compiling == 0:
                    self._since = time.monotonic()
                self._compiling += 1

    def _ends(self, event: str, duration: float, **_) -> None:
        if event.startswith(_COMPILE):
            with self._lock:
                self._compiling = max(self._compiling - 1, 0)

    def text(self) -> str:
        """ "compiling generation (12 s)", "generating, call 1: 140 of 384 responses (8 s)";
        "" where no phase is under way.
        """
        if not self._phases:
            return ""
        phase, now = self._phases[-1], time.monotonic()
        if self._compiling and now - self._since >= 1:
            what = _COMPILED.get(phase.name, phase.name)
            return f"compiling {what} ({now - self._since:.0f} s)"
        counts = self._counts if phase.name in ("generating", "evaluating") else ""
        detail = ": ".join(filter(None, (phase.part, counts)))
        return ", ".join(filter(None, (phase.name, detail))) + f" ({now - phase.since:.0f} s)"


activity = Activity()
