"""What a run writes about itself: metrics.jsonl, rollouts.jsonl, counts of compilations, times by phase."""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax


class JsonLines:
    """A file of one JSON object a line, flushed line by line. On resume, lines from `next_step` on are cut off.

    Every line must have an integer "step".
    """

    def __init__(self, path: Path, next_step: int = 0):
        self.path = path
        kept = [line for line in read_lines(path) if line["step"] < next_step] if path.exists() else []
        # Written anew and moved into place, so that a crash here loses nothing.
        fresh = path.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(line) + "\n" for line in kept))
        fresh.replace(path)
        self._file = path.open("a")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line cut short by a crash is left out."""
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError as error:
            if number < len(path.read_text().splitlines()):
                raise ValueError(f"{path}:{number}: {error}") from error
    return lines


class PhaseTimer:
    """Seconds by phase since the last `take`."""

    def __init__(self):
        self._seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """{"time/<phase>": seconds, "time/other": what no phase claimed, "time/step": all}, and start anew."""
        now = time.perf_counter()
        whole, named = now - self._start, dict(self._seconds)
        self._start, self._seconds = now, {}
        return {**{f"time/{name}": s for name, s in named.items()}, "time/other": max(whole - sum(named.values()), 0.0),
                "time/step": whole}


class CompileCounter:
    """Counts XLA compilations of this process, and their seconds, while it exists (a hit of the persistent cache counts:
    it means that a function met a new shape)."""

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == self._EVENT:
            self.count += 1
            self.seconds += duration
