"""Pictures of a simulation: cost of an informative group and signal per sample by rule,
cost over training.
"""

import textwrap
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


def plot_orders(found: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Samples per group over training, shuffle and memory, for each source of `survey_orders`;
    and what the settings trade.
    """
    plt = pyplot()
    sources = list(dict.fromkeys(case["source"] for case in found))
    panels = len(sources) + 1
    figure, axes = plt.subplots(
        1, panels, figsize=(4.3 * panels, 4.0), constrained_layout=True, squeeze=False
    )
    for axis, source in zip(axes[0], sources):
        for i, case in enumerate(case for case in found if case["source"] == source):
            x = np.arange(1, case["epochs"] + 1)
            axis.plot(x, case["shuffle"]["by_epoch"], color=f"C{i}", lw=1.2, ls="--")
            axis.plot(
                x,
                case["memory"][0]["by_epoch"],
                color=f"C{i}",
                lw=1.6,
                label=f"n_init {case['n_init']}",
            )
        axis.plot([], [], color="0.4", ls="--", label="shuffle")
        axis.plot([], [], color="0.4", label="with memory")
        axis.set_title(textwrap.fill(source, 56), fontsize=9)
        axis.set_xlabel("epoch of the shuffled run")
        axis.set_ylabel("samples drawn per group")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8)
    axis = axes[0, -1]
    case = max(found, key=lambda case: len(case["memory"]))
    for row in case["memory"]:
        main = row["label"] == "default"
        axis.plot(
            row["prompts_ratio"], row["ratio"], "o" if main else ".", color="C3" if main else "0.3"
        )
    for row in case["memory"]:
        # The others lie on the default.
        if row["label"].split()[0] in ("default", "rest", "max_unseen"):
            axis.annotate(
                row["label"],
                (row["prompts_ratio"], row["ratio"]),
                fontsize=8,
                xytext=(4, 3),
                textcoords="offset points",
            )
    axis.set_xlabel("effective number of prompts, memory / shuffle")
    axis.set_ylabel("samples per group, shuffle / memory")
    axis.set_title(f"settings, n_init {case['n_init']}", fontsize=9)
    axis.margins(x=0.25)
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
