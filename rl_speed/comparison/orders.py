"""Screening with memory against plain screening: tokens to the same accuracy, and what the simulation says they would be.

The simulation (`simulation.orders.follow`) trains on the pass rates that policies of a plain run have, at as many groups as the run
trained on by then. It leaves out that another choice of prompts trains another policy; so it predicts ratios at equal numbers
of groups, and `at_steps` compares these. `to_targets` says what users care about.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.comparison.runs import Run
from rl_speed.sampling import Speed
from rl_speed.simulation.orders import Memory, follow
from rl_speed.training.plots import pyplot


def load_curves(folders: Mapping[int, Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps i64[C], rates f64[P, C], tokens of a sample f64[P, C]) from {step: folder of experiments/pass_rates.py}.

    Raises ValueError naming the folder whose prompts are others than the first one's, or that has no lengths.
    """
    steps, found = sorted(folders), []
    for step in steps:
        found.append(json.loads((folders[step] / "pass_rates.json").read_text()))
        if "lengths" not in found[-1]:
            raise ValueError(f"{folders[step]}/pass_rates.json has no lengths: measure it again")
        if found[-1]["ids"] != found[0]["ids"]:
            raise ValueError(f"{folders[step]}/pass_rates.json is of other prompts than {folders[steps[0]]}/pass_rates.json")
    column = lambda name: np.array([x[name] for x in found], np.float64).T
    return np.array(steps), column("rates"), column("lengths")


def predict(steps: np.ndarray, rates: np.ndarray, lengths: np.ndarray, rule: Speed, groups: int, settings: Sequence[Memory],
            every: int, seeds: Sequence[int]) -> dict[str, Any]:
    """Samples and tokens drawn by every `every`-th step, with a shuffle and with memory; rates between measurements are linear.

    Args:
      steps, rates, lengths: of `load_curves`; the last step is a multiple of `every`. groups: trained on in a step.

    Returns:
      {"steps": i64[K], "shuffle": {"samples", "tokens": f64[K], means over seeds}, "memory": [the same for each of the settings]}
    """
    ends = np.arange(every, steps[-1] + 1, every)
    at = lambda values: np.stack([np.interp(ends - every / 2, steps, row) for row in values])
    curves, tokens = at(rates), at(lengths)

    def drawn(memory: Memory | None) -> dict[str, np.ndarray]:
        courses = [follow(curves, rule, memory, seed, ends=ends * groups, lengths=tokens) for seed in seeds]
        mean = lambda values: np.mean([np.cumsum(v) for v in values], axis=0)
        return {"samples": mean([rule.n_init * c.screened + rule.n_cont * c.groups for c in courses]),
                "tokens": mean([c.tokens for c in courses])}

    return {"steps": ends, "shuffle": drawn(None), "memory": [drawn(memory) for memory in settings]}


def to_targets(plain: Sequence[Run], others: Sequence[Run], targets: Sequence[float]) -> list[dict[str, Any]]:
    """For each target accuracy: tokens of every run of either (None: not reached), and the ratio plain / other of every seed."""
    rows = []
    for target in targets:
        a, b = ([run.reaches(target, "tokens") for run in runs] for runs in (plain, others))
        rows.append({"target": target, "plain": a, "other": b, "ratios": [x / y for x, y in zip(a, b) if None not in (x, y)]})
    return rows


def at_steps(plain: Sequence[Run], others: Sequence[Run], steps: Sequence[int], x: str) -> list[list[float]]:
    """For each step the ratio plain / other of every seed, of "tokens" or "samples" drawn by then."""
    drawn = lambda run, step: run.records[step - 1][f"total/{x}"]
    return [[drawn(a, step) / drawn(b, step) for a, b in zip(plain, others)] for step in steps]


def longest_unseen(runs: Sequence[Run]) -> float:
    """Epochs (visits / prompts) for which any prompt went unseen in any of the runs, as of the end of a step."""
    return max(record["prompts/unseen_max"] for run in runs for record in run.records)


HOW = """Plain SPEED (a new shuffle each epoch) against SPEED with memory (config.data.order="memory"), else the same configuration.
Ratios are generated tokens (or samples) of plain over those with memory: 1.5 means half as many again without memory. Seed by seed;
the mean over seeds, and in brackets the smallest and largest. A target counts as reached where the held-out curve first crosses it.
The simulation runs the same stream, order and rule on the pass rates and lengths measured along a plain run (seed 0), over the same
number of groups; it predicts ratios at equal steps. It cannot know that memory trains another policy: where a policy needs more or
fewer steps to the same accuracy, the ratio at a target moves away from the one at its step."""


def memory_markdown(cases: Sequence[Mapping[str, Any]], final: Mapping[str, Sequence[float]], spent: Mapping[str, Sequence[float]],
                    command: str, made: str) -> str:
    """The whole table.md of experiments/memory.py."""
    spread = lambda x, form: f"{np.mean(x):{form}} ({min(x):{form}} to {max(x):{form}})" if len(x) else "not reached"
    reached = lambda x: spread([v / 1e3 for v in x], ",.0f") if None not in x else "not by every seed"
    line = lambda cells: "| " + " | ".join(cells) + " |\n"
    head = lambda cells: line(cells) + line(["---"] * len(cells))
    text = f"# Screening with memory, measured and simulated\n\n`{command}`\n\n{made}\n\n{HOW}\n\n"
    text += head(["method", "final accuracy", "generated tokens in all, thousands"])
    for name in final:
        text += line([name, spread(final[name], ".4f"), spread([x / 1e3 for x in spent[name]], ",.0f")])
    for case in cases:
        text += (f"\n## {case['method']}\n\nNo prompt was unseen for longer than {case['unseen']:.2f} epochs (bound "
                 f"{case['bound']:g}).\n\n" + head(["accuracy", "thousand tokens, plain", "with memory", "ratio"]))
        for row in case["targets"]:
            text += line([f"{row['target']:g}", reached(row["plain"]), reached(row["other"]), spread(row["ratios"], ".2f")])
        text += "\n" + head(["step", "ratio of samples", "simulated", "ratio of tokens", "simulated", "simulated / measured tokens"])
        for row in case["steps"]:
            cells = [cell for x in ("samples", "tokens") for cell in (spread(row[x]["measured"], ".2f"),
                                                                      f"{row[x]['simulated']:.2f}")]
            text += line([str(row["step"]), *cells, f"{row['tokens']['simulated'] / np.mean(row['tokens']['measured']):.2f}"])
    return text


def plot_memory(runs: Mapping[str, Sequence[Run]], measured: Mapping[str, tuple[Sequence[int], Sequence[Sequence[float]]]],
                predicted: Mapping[str, tuple[np.ndarray, np.ndarray]], path: Path) -> Path:
    """Accuracy over generated tokens, a thin line per seed; and ratios of tokens at equal steps, measured and predicted.

    Args:
      runs: by label, the first is plain screening. measured, predicted: by label of the others, (steps, ratios).
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for i, (label, members) in enumerate(runs.items()):
        for k, run in enumerate(members):
            left.plot(*run.curve("tokens"), color=f"C{i}", lw=1.0, alpha=0.8, label=label if not k else None)
    left.set_xlabel("generated tokens")
    left.set_ylabel("held-out accuracy")
    left.legend()
    for i, label in enumerate(measured, 1):
        steps, ratios = measured[label]
        for k, of_seed in enumerate(np.transpose(ratios)):
            right.plot(steps, of_seed, color=f"C{i}", lw=1.0, alpha=0.8, label=f"{label}: measured" if not k else None)
        right.plot(*predicted[label], color=f"C{i}", lw=2.0, ls="--", label=f"{label}: simulated")
    right.axhline(1.0, color="0.6", lw=0.8)
    right.set_xlabel("step: equally many groups trained on")
    right.set_ylabel("generated tokens so far, plain / memory")
    right.legend(fontsize=8)
    figure.savefig(path)
    plt.close(figure)
    return path
