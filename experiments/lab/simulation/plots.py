"""Pictures of a simulation: cost of an informative group and signal per sample by rule,
cost over training.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.runtime.plotting import pyplot


def plot_cost(
    rows: Sequence[Mapping[str, Any]], rates: np.ndarray, source: str, path: Path
) -> Path:
    """The pass rates, and samples per informative group by rule, with what theory says."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12.5, 4.2), constrained_layout=True, width_ratios=(1, 1.7)
    )
    left.hist(
        rates, bins=np.linspace(0, 1, 26), weights=np.full(len(rates), 1 / len(rates)), color="0.6"
    )
    left.set_xlabel("pass rate")
    left.set_ylabel("share of prompts")
    left.set_title(
        f"never solved {np.mean(rates == 0):.0%}, always {np.mean(rates == 1):.0%}", fontsize=10
    )
    _bars(right, rows, "samples_per_informative", "{:.1f}")
    right.set_xlabel(
        "samples drawn per informative group (right and wrong answers): less is better"
    )
    figure.suptitle(source, fontsize=10)
    figure.savefig(path)
    plt.close(figure)
    return path


def plot_signal(rows: Sequence[Mapping[str, Any]], source: str, path: Path) -> Path:
    """Signal per sample by rule, and the gradient of a group that is trained on."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12.5, 4.2), constrained_layout=True, sharey=True
    )
    _bars(left, rows, "signal_per_sample", "{:.3f}")
    left.set_xlabel(
        "signal per sample drawn (Fisher information kept,\n"
        "$\\Sigma\\,(N-1)\\,s^2$ / samples; at most about 1/4): more is better"
    )
    _bars(right, rows, "gradient", "{:.3f}", legend=False)
    right.set_xlabel(
        "gradient of a trained group in its prompt's logit\n(mean $s^2$; p (1-p) without selection)"
    )
    figure.suptitle(source, fontsize=10)
    figure.savefig(path)
    plt.close(figure)
    return path


def plot_epochs(drift: Mapping[str, Mapping[str, Any]], curves: np.ndarray, path: Path) -> Path:
    """Over training: samples per informative group, share of prompts accepted,
    signal per sample; and the pass rates f64[P, E].
    """
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(12.5, 7.2), constrained_layout=True, sharex=True)
    panels = (
        ("samples_per_informative", "samples per informative group"),
        ("accepted", "share of prompts accepted"),
        ("signal_per_sample", "signal per sample (Fisher information kept)"),
    )
    for axis, (name, title) in zip(axes.ravel(), panels):
        for i, (rule, at) in enumerate(drift.items()):
            # Uniform and dynamic sampling cost the same per informative group: one must not
            # hide the other.
            axis.plot(
                np.arange(1, curves.shape[1] + 1),
                at[name],
                color=f"C{i}",
                label=rule,
                lw=1.4,
                ls="--" if i == 1 else "-",
            )
        axis.set_title(title, fontsize=10)
        axis.set_ylim(bottom=0)
    axis = axes[1, 1]
    x = np.arange(1, curves.shape[1] + 1)
    shares = [(curves == 0).mean(0), ((curves > 0) & (curves < 1)).mean(0), (curves == 1).mean(0)]
    axis.stackplot(
        x,
        shares,
        labels=["never solved", "in between", "always solved"],
        colors=["0.6", "#d8e6c8", "0.9"],
    )
    axis.plot(x, curves.mean(0), color="k", lw=1.4, label="mean pass rate")
    axis.set_title("share of prompts by measured pass rate", fontsize=10)
    axis.set_ylim(0, 1)
    for below in axes[1]:
        below.set_xlabel("epoch")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    more = axis.get_legend_handles_labels()
    figure.legend(handles + more[0], labels + more[1], loc="outside right center", fontsize=9)
    figure.savefig(path)
    plt.close(figure)
    return path


def _bars(
    axis: Any, rows: Sequence[Mapping[str, Any]], name: str, form: str, legend: bool = True
) -> None:
    at = np.arange(len(rows))[::-1]
    values = np.array([row["measured"][name] for row in rows])
    shown = np.where(np.isfinite(values), values, 0)
    axis.barh(at, shown, color=[f"C{i}" for i in range(len(rows))], alpha=0.75, height=0.7)
    known = [
        (row["exact"][name], y)
        for row, y in zip(rows, at)
        if np.isfinite(row["exact"].get(name, np.nan))
    ]
    if known:
        axis.plot(*zip(*known), "k|", ms=14, mew=1.6, ls="none", label="theory, exact")
    top = max(shown.max(), 1e-9)
    for value, y in zip(values, at):
        axis.text(
            min(value, top) + 0.02 * top if np.isfinite(value) else 0.02 * top,
            y,
            form.format(value) if np.isfinite(value) else "none",
            va="center",
            fontsize=9,
        )
    axis.set_yticks(at, [row["rule"] for row in rows])
    axis.set_xlim(0, 1.15 * top)
    axis.grid(axis="y", visible=False)
    if legend and known:
        axis.legend(loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.1)
