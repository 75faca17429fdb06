"""What is read off finished runs for tables and pictures of ablations:
a number a run (`Column`), or a curve a run (`Curve`).
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from rl_speed.runtime.plotting import smooth
from rl_speed.studies.comparison.runs import Run

# Of a run's first steps: they compile and fill the buffer.
WARM_UP = 3
CLOCKS = {
    "step": "step",
    "samples": "generated samples",
    "tokens": "generated tokens",
    "train_s": "training wall-clock (s)",
    "eval/entropy": "held-out entropy (nats a token)",
}

Value = Callable[[Run], float | None]


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table.

    `title` names the unit; `value` is None where a run has no such number (a target it
    never reached).
    """

    title: str
    value: Value
    digits: int = 3


@dataclasses.dataclass(frozen=True)
class Curve:
    """A panel with a line for each variant: `points` gives (x f[n], y f[n]) of one run,
    the same n for every seed of a variant.
    """

    title: str
    x: str
    points: Callable[[Run], tuple[np.ndarray, np.ndarray]]
    log_x: bool = False


@dataclasses.dataclass(frozen=True)
class Bars:
    """A panel with a bar for each variant."""

    title: str
    value: Value


def _settled(run: Run) -> list[dict]:
    return run.records[min(WARM_UP, len(run.records) - 1) :]


def final(name: str = "eval/accuracy") -> Value:
    """Of the last evaluation."""
    return lambda run: run.summary["evaluations"][-1].get(name)


def total(name: str, scale: float = 1.0) -> Value:
    """A total of the run, "samples", "tokens" or "train_s", divided by `scale`."""
    return lambda run: run.summary[name] / scale


def reaches(target: float, clock: str, scale: float = 1.0) -> Value:
    """Where held-out accuracy first reaches the target, None if it does not."""

    def value(run: Run) -> float | None:
        at = run.reaches(target, clock)
        return None if at is None else at / scale

    return value


def per_step(name: str, scale: float = 1.0) -> Value:
    """Mean over the run's steps, the first ones left out, of a number in metrics.jsonl."""
    return lambda run: float(np.mean([record.get(name, 0.0) for record in _settled(run)])) / scale


def last_steps(name: str, share: float = 0.25) -> Value:
    """Mean over the last `share` of the steps."""
    return lambda run: float(
        np.mean([r[name] for r in run.records[-max(1, round(share * len(run.records))) :]])
    )


def ratio(above: str, below: str) -> Value:
    """Of two sums over steps: "generated_tokens" by "generated_samples" are sampled tokens a
    sample. None over 0.
    """

    def value(run: Run) -> float | None:
        bottom = sum(record[below] for record in _settled(run))
        return sum(record[above] for record in _settled(run)) / bottom if bottom else None

    return value


def step_seconds(run: Run) -> float:
    """Mean seconds a step, compilation left out."""
    return float(
        np.mean([record["time/step"] - record["time/compile"] for record in _settled(run)])
    )


def pass_rate_share(bin: int) -> Callable[[dict], float]:
    """Of one step: share of its judged prompts in a bin of the histogram of first-round pass rates,
    0: never right, -1: always.
    """
    return lambda record: record["pass_rates"][bin] / max(sum(record["pass_rates"]), 1)


def held_out(clock: str, name: str = "eval/accuracy", title: str = "held-out accuracy") -> Curve:
    """A number of the evaluations over a clock, or over another of their numbers (a key
    of `CLOCKS`).
    """

    def points(run: Run) -> tuple[np.ndarray, np.ndarray]:
        found = [(p[clock], p[name]) for p in run.summary["evaluations"] if name in p]
        return np.array(found, float).reshape(-1, 2).T

    return Curve(title, CLOCKS[clock], points)


def training(name: str | Callable[[dict], float], title: str) -> Curve:
    """A number in metrics.jsonl over steps (running mean): its name,
    or a function of one step's record.
    """
    read = name if callable(name) else lambda record: record[name]
    return Curve(
        title,
        "step",
        lambda run: (
            np.array([r["step"] for r in run.records], float),
            smooth([read(record) for record in run.records]),
        ),
    )


def evaluation_at(run: Run, share: float) -> dict:
    """The first evaluation at or after `share` of the run's steps, and after its start."""
    least = max(1, share * run.summary["steps"])
    return next(p for p in run.summary["evaluations"] if p["step"] >= least)


def pass_at(k: int, share: float = 1.0) -> Value:
    """pass@k of the evaluation at `share` of the run; None where it drew fewer than k samples."""
    return lambda run: evaluation_at(run, share).get(_pass_name(k))


def pass_at_curve(share: float, title: str) -> Curve:
    """pass@k over k = 1, 2, 4, ..., of the evaluation at `share` of the run."""

    def points(run: Run) -> tuple[np.ndarray, np.ndarray]:
        found = evaluation_at(run, share)
        ks = [k for k in (2**i for i in range(20)) if _pass_name(k) in found]
        return np.array(ks, float), np.array([found[_pass_name(k)] for k in ks])

    return Curve(title, "k", points, log_x=True)


def _pass_name(k: int) -> str:
    return "eval/accuracy" if k == 1 else f"eval/pass_at_{k}"


ACCURACY = Column("final accuracy", final())
SAMPLES = Column("samples (thousands)", total("samples", 1e3), 0)
TOKENS = Column("tokens (thousands)", total("tokens", 1e3), 0)
SECONDS = Column("training (s)", total("train_s"), 1)
BY_CLASS = tuple(
    Column(name, final(f"eval/accuracy_{name}")) for name in ("easy", "middle", "long", "beyond")
)
