"""Pictures of a comparison: held-out accuracy against three clocks, and Figures 4 and 5 of the SPEED paper."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_speed.comparison.runs import Run
from rl_speed.comparison.table import AXES, group_runs
from rl_speed.training.plots import pyplot, smooth


def mean_curve(runs: Sequence[Run], axis: str, points: int = 200) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, smallest, largest) over seeds, on the range that all seeds cover."""
    curves = [run.curve(axis) for run in runs]
    x = np.linspace(0, min(at[-1] for at, _ in curves), points)
    values = np.stack([np.interp(x, at, accuracy) for at, accuracy in curves])
    return x, values.mean(0), values.min(0), values.max(0)


def plot_accuracy(runs: Sequence[Run], target: float | None, path: Path) -> Path:
    """Held-out accuracy over wall-clock, generated tokens and optimizer steps; bands span the seeds."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 3.8), constrained_layout=True, sharey=True)
    for i, (variant, members) in enumerate(group_runs(runs).items()):
        for panel, axis in zip(axes, AXES):
            x, mean, low, high = mean_curve(members, axis)
            line, = panel.plot(x, mean, label=variant.label, color=f"C{i}", ls="-" if variant.baseline else "--")
            panel.fill_between(x, low, high, color=line.get_color(), alpha=0.15, lw=0)
    for panel, label in zip(axes, AXES.values()):
        panel.set_xlabel(label)
        if target is not None:
            panel.axhline(target, color="0.5", lw=0.8, ls=":")
    axes[0].set_ylabel("held-out accuracy")
    axes[0].legend()
    figure.savefig(path)
    plt.close(figure)
    return path


def plot_training(runs: Sequence[Run], path: Path) -> Path:
    """Figure 4: accuracy of the groups trained on, and gradient norm, over steps (mean over seeds, smoothed)."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(13.5, 3.8), constrained_layout=True)
    panels = (("accuracy", "training accuracy of trained groups"), ("grad_norm", "gradient norm before clipping"),
              ("informative_groups", "share of trained groups with both right and wrong"))
    for i, (variant, members) in enumerate(group_runs(runs).items()):
        steps = min(len(run.records) for run in members)
        for axis, (name, title) in zip(axes, panels):
            values = np.mean([[record[name] for record in run.records[:steps]] for run in members], axis=0)
            axis.plot(smooth(values), label=variant.label, color=f"C{i}", ls="-" if variant.baseline else "--")
            axis.set_title(title)
            axis.set_xlabel("step")
            axis.set_ylim(bottom=0)
    axes[0].legend()
    figure.savefig(path)
    plt.close(figure)
    return path
