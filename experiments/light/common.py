"""What all parts of the first light share: a result with figures and checks, shapes, timing."""

import argparse
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rl_speed.policy import ModelConfig

QWEN_1P5B = ModelConfig(
    vocab_size=151936,
    width=1536,
    layers=28,
    heads=12,
    kv_heads=2,
    head_dim=128,
    mlp_width=8960,
    rope_theta=1e6,
    dtype="bfloat16",
)
# For a CPU, where the program is tried: everything runs, and no figure means anything.
TINY = ModelConfig(
    vocab_size=512, width=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_width=128
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a part is run.

    Attributes:
      small: tiny shapes, as on a CPU. smol: directory of SmolLM2-135M-Instruct, or "".
      scratch: folder for large files, removed at the end.
    """

    small: bool
    smol: str
    scratch: Path

    def model(self, **changes: Any) -> ModelConfig:
        """The policy's shape, for this platform."""
        shape = TINY if self.small else QWEN_1P5B
        return dataclasses.replace(shape, platform=jax.default_backend(), **changes)


@dataclasses.dataclass
class Result:
    """What a part found: figures to read, and checks that pass or fail."""

    path: Path | None = None  # written there after every check, for a part that is ended early
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Record a check that fails where `value` is above `limit`, or NaN."""
        self._check(name, value, f"at most {limit:g}", value <= limit)

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Record a check that fails where `value` is below `limit`, or NaN."""
        self._check(name, value, f"at least {limit:g}", value >= limit)

    def _check(self, name: str, value: float, wanted: str, ok: bool) -> None:
        shown = float(value) if math.isfinite(value) else str(value)
        self.checks.append({"name": name, "value": shown, "wanted": wanted, "ok": bool(ok)})
        self.write()

    def write(self) -> None:
        """Write what was found so far."""
        if self.path is not None:
            found = {"figures": self.figures, "checks": self.checks}
            self.path.write_text(json.dumps(found, indent=1) + "\n")

    @contextlib.contextmanager
    def attempt(self, name: str):
        """Record what the block raises as a failed check, and go on behind it."""
        try:
            yield
        except Exception as error:  # a failure is a result
            text = f"{type(error).__name__}: {str(error).strip()}"[:600]
            self.checks.append({"name": name, "value": text, "wanted": "no error", "ok": False})
            self.write()


def seconds_of(call: Callable[[], Any], repeats: int = 3) -> tuple[float, float]:
    """(median seconds of `repeats` calls, seconds of a first call, which compiles)."""
    found = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - begin)
    return float(np.median(found[1:])), found[0]


def memory_limit() -> int | None:
    """Bytes of a device that JAX may use; None where the platform does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def peak_memory() -> int | None:
    """Largest number of bytes held on a device so far; None where the platform does not tell."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def main(run: Callable[[Setting, Result], None]) -> None:
    """Run a part as a program of its own: writes its result to --write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--smol", default="")
    parser.add_argument("--small", action="store_true")
    given = parser.parse_args()
    found = Result(given.write)
    run(Setting(given.small, given.smol, given.scratch), found)
    found.write()
