"""JSON and JSON-lines files of a run, phase times, slow steps, and a compilation counter."""

import contextlib
import errno
import json
import logging
import re
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from rl_speed.activity import activity

log = logging.getLogger(__name__)


class AppendedFile:
    """Appends whole records to a file, unbuffered.

    A record that cannot be written (full disk) is kept and written before the next one. A
    half-written record is removed.

    Attributes:
      failures: writes that failed since this object was made.
    """

    def __init__(self, path: Path):
        self.path = path
        self.failures = 0
        self._waiting: list[bytes] = []
        self._file = path.open("ab", buffering=0)
        self._good = self._file.tell()

    def write(self, record: bytes) -> None:
        self._waiting.append(record)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                if self._file.write(self._waiting[0]) < len(self._waiting[0]):
                    raise OSError(errno.ENOSPC, "only a part of the record was written: disk full")
                self._good += len(self._waiting.pop(0))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._good)
            self.failures += 1
            log.error(
                "cannot write %s (%s): %d records wait for the next attempt",
                self.path,
                error,
                len(self._waiting),
            )

    def close(self) -> None:
        self._flush()
        self._file.close()


class JsonLines:
    """Writes a file with one JSON object per line, flushed after each line (`AppendedFile`).

    Every line has an integer "step". On opening, lines of step `next_step` and later are removed.
    """

    def __init__(self, path: Path, next_step: int = 0):
        self.path = path
        kept = (
            [line for line in read_steps(path) if line["step"] < next_step] if path.exists() else []
        )
        # Written to a new file and moved into place, so a crash here loses nothing.
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = AppendedFile(path)

    @property
    def failures(self) -> int:
        """Writes that failed since this object was made."""
        return self._file.failures

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._file.write((json.dumps({"step": step, **values}) + "\n").encode())

    def close(self) -> None:
        self._file.close()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a temporary file and move it into place, so readers see the old or the new file."""
    fresh = path.with_name(path.name + ".tmp")
    try:
        fresh.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        fresh.replace(path)
    except OSError as error:  # a full disk's error does not name the file
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """Reads a JSON object from a file that a person may have edited.

    Args:
      advice: what to do if the file is damaged; ends the message.

    Raises:
      ValueError: the file is no JSON object; names the file and the problem. OSError: it cannot be
        read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        # The bytes are no text or no JSON, or the brackets are nested too deep.
        raise ValueError(f"{path} is damaged: no JSON ({error}); {advice}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} is damaged: it must hold a JSON object, and holds {kind_of(found)}; {advice}"
        )
    return found


def kind_of(value: Any) -> str:
    """JSON's name for a value: "a list", "null"."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads the objects of a JSON-lines file, without a last line that a crash cut short.

    Raises ValueError for a damaged line; names the file and the line.
    """
    try:
        lines = []
        texts = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except (json.JSONDecodeError, RecursionError) as error:
            if number < len(texts):
                raise ValueError(f"{path}:{number} is damaged: {error}") from None
            break
        if not isinstance(lines[-1], dict):
            raise ValueError(
                f"{path}:{number} is damaged: it must hold a JSON object, and holds "
                f"{kind_of(lines[-1])}"
            )
    return lines


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Reads a JSON-lines file (`read_lines`) and checks that every object has an integer "step".

    Raises ValueError that names the file and the line.
    """
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        if type(line.get("step")) is not int:
            raise ValueError(
                f'{path}:{number} is damaged: it must have an integer "step"; restore '
                "the line, or delete it"
            )
    return lines


# Upper edges of `pass_rate_histogram`: each bin holds rates above the previous edge.
PASS_RATE_EDGES = (0.0, *(k / 10 for k in range(1, 10)), 1 - 1e-6, 1.0)


def held_out_names(point: Mapping[str, Any]) -> list[str]:
    """Names of the held-out sets in a point of evaluations.jsonl, in order: NAME of each
    "eval/NAME/accuracy". Empty if the run has one unnamed set.
    """
    found = (re.fullmatch("eval/([^/]+)/accuracy", key) for key in point)
    return [match[1] for match in found if match]


def pass_rate_histogram(rates: Sequence[float]) -> list[int]:
    """Counts of pass rates in twelve bins: 0; (0, .1], (.1, .2], ... (.9, 1); 1."""
    inner = [rate for rate in rates if 0 < rate < 1]
    counts = [0] * 10
    for rate in inner:
        # The small offset keeps 0.3, computed as 3 / 10, in its own bin.
        counts[min(int(rate * 10 - 1e-9), 9)] += 1
    return [sum(rate == 0 for rate in rates), *counts, sum(rate == 1 for rate in rates)]


# Phases of a step, as messages name them.
_PHASES = {"update": "updating", "transfer": "sending weights", "fused": "fused step"}


class PhaseTimer:
    """Measures the seconds of each phase since the last `take`.

    Args:
      spent: result of an earlier `take` to continue from.
    """

    def __init__(self, spent: Mapping[str, float] | None = None):
        named = {name.removeprefix("time/"): seconds for name, seconds in (spent or {}).items()}
        self._start = time.perf_counter() - named.pop("step", 0.0)
        self._seconds = {
            name: seconds for name, seconds in named.items() if name not in ("other", "compile")
        }

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            with activity.phase(_PHASES.get(name, name)):
                yield
        finally:
            self.add(name, time.perf_counter() - begin)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Returns {"time/<phase>": seconds, "time/other": the rest, "time/step": total}, and
        restarts.
        """
        now = time.perf_counter()
        whole = now - self._start
        named = dict(self._seconds)
        self._start = now
        self._seconds = {}
        return {
            **{f"time/{name}": s for name, s in named.items()},
            "time/other": max(whole - sum(named.values()), 0.0),
            "time/step": whole,
        }


def counted_over_restarts(values: Sequence[float]) -> int:
    """Total of a per-process counter over restarts. Where its values fall, the run was resumed and
    the counter restarted at 0.
    """
    return round(
        sum(now - before if now >= before else now for before, now in zip([0.0, *values], values))
    )


class SlowSteps:
    """Finds steps that take more than `factor` times the median of recent steps, compilation
    excluded.

    Args:
      window: recent steps. least: steps before the first warning. floor_s: seconds below which no
        step is slow.

    Attributes:
      count: slow steps since this object was made.
    """

    def __init__(
        self, factor: float = 10.0, window: int = 50, least: int = 5, floor_s: float = 1.0
    ):
        self._factor = factor
        self._least = least
        self._floor_s = floor_s
        self._latest: deque[float] = deque(maxlen=window)
        self.count = 0

    def see(self, step: int, times: Mapping[str, float], notes: Mapping[str, float]) -> str | None:
        """Records a step, and returns a warning if it was slow, else None.

        Args:
          times: "time/<phase>" in seconds, with "time/step" and "time/compile". notes: other
            numbers to report.
        """
        seconds = times["time/step"] - times.get("time/compile", 0.0)
        median = statistics.median(self._latest) if len(self._latest) >= self._least else None
        self._latest.append(seconds)
        if median is None or seconds < max(self._factor * median, self._floor_s):
            return None
        self.count += 1
        phases = sorted(
            (
                (s, name.removeprefix("time/"))
                for name, s in times.items()
                if name not in ("time/step", "time/compile")
            ),
            reverse=True,
        )
        return (
            (
                f"step {step} took {seconds:.1f} s, {seconds / median:.0f} times the median of "
                f"{median:.2f} s: "
            )
            + ", ".join(f"{name} {s:.1f} s" for s, name in phases)
            + "".join(f", {name} {value:g}" for name, value in notes.items())
        )


class CompileCounter:
    """Counts XLA compilations of this process and their seconds. A hit of the persistent cache
    counts, because a function got a new shape.
    """

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration: float, **_: Any) -> None:
        if event == self._EVENT:
            self.count += 1
            self.seconds += duration
