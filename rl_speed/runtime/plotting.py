"""Plots a run from the files in its workdir."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.runtime.metrics import held_out_names, read_steps
from rl_speed.runtime.workdir import read_summary


def pyplot():
    """Returns matplotlib.pyplot, set up to draw without a display, in this project's style."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.alpha": 0.3,
            "figure.dpi": 120,
            "legend.frameon": False,
        }
    )
    return plt


def smooth(values: Sequence[float], window: int = 15) -> np.ndarray:
    """Running mean over the finite ones of the latest `window` values; NaN where there is none."""
    values = np.asarray(values, float)
    good = np.isfinite(values)
    total = np.cumsum(np.concatenate([[0.0], np.where(good, values, 0.0)]))
    count = np.cumsum(np.concatenate([[0], good]))
    at = np.arange(1, len(total))
    first = np.maximum(at - window, 0)
    held = count[at] - count[first]
    return np.where(held > 0, (total[at] - total[first]) / np.maximum(held, 1), np.nan)


def running_median(values: Sequence[float], window: int = 15) -> np.ndarray:
    """Running median over the latest `window` values, which hides single slow steps."""
    values = np.asarray(values, float)
    return np.array([np.median(values[max(i + 1 - window, 0) : i + 1]) for i in range(len(values))])


def _lines(
    axis: Any, steps: np.ndarray, records: list[dict], names: dict[str, str], title: str
) -> None:
    for name, label in names.items():
        if name in records[0]:
            values = [r.get(name, np.nan) for r in records]
            (line,) = axis.plot(steps, smooth(values), label=label)
            axis.plot(steps, values, color=line.get_color(), alpha=0.2, lw=0.7)
    axis.set_title(title)
    axis.set_xlabel("step")
    axis.set_ylim(bottom=0)
    if len(names) > 1:
        axis.legend()


def plot_run(workdir: Path) -> list[Path]:
    """Draw plots/accuracy.png and plots/training.png of a run, finished or running, and
    plots/devices.png if generation and update overlapped. Returns the files drawn.
    """
    plt = pyplot()
    out = workdir / "plots"
    out.mkdir(exist_ok=True)
    records = read_steps(workdir / "metrics.jsonl")
    summary = read_summary(workdir / "summary.json", "the run writes a new one at its end")
    drawn = []
    if summary["evaluations"]:
        drawn.append(_accuracy(plt, summary, out / "accuracy.png"))
    if records:
        drawn.append(_training(plt, records, summary, out / "training.png"))
    if beside := [r for r in records if "process/update_s" in r]:
        drawn.append(_devices(plt, beside, summary, out / "devices.png"))
    return drawn


def _devices(plt: Any, records: list[dict], summary: dict, path: Path) -> Path:
    """Plot the shares of a step's time in which generation and update were active."""
    figure, axis = plt.subplots(figsize=(7, 3.6), constrained_layout=True)
    steps = [r["step"] for r in records]
    for name, label in (("generate", "generation"), ("update", "update")):
        shares = [r[f"process/{name}_s"] / max(r["process/step_s"], 1e-9) for r in records]
        (line,) = axis.plot(steps, shares, lw=0.6, alpha=0.4)
        axis.plot(steps, running_median(shares), color=line.get_color(), label=label)
    axis.set(xlabel="step", ylabel="share of the step's seconds", ylim=(0, 1.05))
    axis.set_title("devices at work (running median)")
    axis.legend()
    figure.suptitle(f"{summary['method']}, seed {summary['seed']}")
    figure.savefig(path)
    plt.close(figure)
    return path


def _accuracy(plt: Any, summary: dict, path: Path) -> Path:
    points = summary["evaluations"]
    last = points[-1]
    # One line per held-out set if there are several, else per class.
    parts = {name: f"eval/{name}/accuracy" for name in held_out_names(last)} or {
        name.removeprefix("eval/accuracy_"): name
        for name in sorted(last)
        if name.startswith("eval/accuracy_")
    }
    panels = 3 + bool(parts)
    figure, axes = plt.subplots(1, panels, figsize=(4.2 * panels, 3.4), constrained_layout=True)
    accuracy = np.array([p["eval/accuracy"] for p in points])
    error = np.array([p["eval/standard_error"] for p in points])
    clocks = (
        ("train_s", "training wall-clock (s)", 1),
        ("tokens", "generated tokens (M)", 1e6),
        ("step", "step", 1),
    )
    for axis, (name, label, scale) in zip(axes, clocks):
        x = np.array([p[name] for p in points]) / scale
        axis.plot(x, accuracy, marker="o", ms=3)
        axis.fill_between(x, accuracy - 2 * error, accuracy + 2 * error, alpha=0.2)
        axis.set_xlabel(label)
        axis.set_ylabel("held-out accuracy")
    if parts:
        for label, name in parts.items():
            axes[3].plot(
                [p["step"] for p in points],
                [p.get(name, np.nan) for p in points],
                marker="o",
                ms=3,
                label=label,
            )
        axes[3].set_xlabel("step")
        axes[3].set_ylabel("held-out accuracy")
        axes[3].legend()
    figure.suptitle(
        f"{summary['method']}, seed {summary['seed']}: held-out accuracy "
        "(band: two standard errors)"
    )
    figure.savefig(path)
    plt.close(figure)
    return path


def _training(plt: Any, records: list[dict], summary: dict, path: Path) -> Path:
    steps = np.array([r["step"] for r in records])
    figure, axes = plt.subplots(2, 4, figsize=(17, 6.8), constrained_layout=True)
    flat = axes.ravel()
    _lines(
        flat[0],
        steps,
        records,
        {"train/accuracy": "accuracy", "train/informative_groups": "informative groups"},
        "groups trained on",
    )
    _lines(flat[1], steps, records, {"train/grad_norm": "norm"}, "gradient norm before clipping")
    _lines(
        flat[2],
        steps,
        records,
        {"rollout/acceptance": "acceptance"},
        "share of screened prompts accepted",
    )
    _lines(
        flat[3],
        steps,
        records,
        {"train/age_mean": "mean", "train/age_max": "largest", "buffer/size": "groups waiting"},
        "sample age (updates) and buffer",
    )
    _lines(flat[4], steps, records, {"train/length": "tokens"}, "response length")
    _lines(flat[5], steps, records, {"train/entropy": "nats"}, "policy entropy per token")
    _lines(
        flat[6], steps, records, {"rollout/generated_tokens": "tokens"}, "generated tokens per step"
    )
    phases = ["generate", "score", "update", "fused", "other"]
    seconds = [running_median([r.get(f"time/{name}", 0.0) for r in records]) for name in phases]
    flat[7].stackplot(steps, seconds, labels=phases, alpha=0.8)
    # The first step compiles, and would flatten the rest.
    flat[7].set_ylim(0, 1.1 * np.max(np.sum(seconds, axis=0)[min(5, len(steps) - 1) :]))
    flat[7].set_title("seconds per step by phase (running median)")
    flat[7].set_xlabel("step")
    flat[7].legend(loc="upper left")
    figure.suptitle(f"{summary['method']}, seed {summary['seed']}")
    figure.savefig(path)
    plt.close(figure)
    return path


def plot_sft(workdir: Path) -> Path:
    """Draw loss.png in a supervised run's workdir: training loss, held-out loss, and held-out
    accuracy where it was measured.
    """
    records = read_steps(workdir / "metrics.jsonl")
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), constrained_layout=True)
    updates = [r for r in records if "train/loss" in r]
    axis.plot(
        [r["step"] for r in updates],
        [r["train/loss"] for r in updates],
        lw=0.8,
        label="training batch",
    )

    def series(name):
        return ([r["step"] for r in records if name in r], [r[name] for r in records if name in r])

    steps, losses = series("eval/loss")
    axis.plot(steps, losses, "o-", ms=4, label="held out")
    axis.set(xlabel="update", ylabel="nats per solution token", ylim=(0, None))
    steps, accuracies = series("eval/accuracy")
    if steps:
        other = axis.twinx()
        other.plot(steps, accuracies, "s--", ms=4, color="tab:green")
        other.set(ylim=(0, 1), ylabel="held-out accuracy (dashed)")
    axis.legend()
    figure.savefig(workdir / "loss.png")
    plt.close(figure)
    return workdir / "loss.png"
