"""Screening with memory against plain screening: tokens to the same accuracy,
and what the simulation says they would be.

The simulation (`simulation.orders.follow`) trains on the pass rates that policies of a plain run
have, at as many groups as the run trained on by then. It leaves out that another choice of prompts
trains another policy; so it predicts ratios at equal numbers of groups, and `at_steps` compares
these. `to_targets` says what users care about.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.runtime.plotting import pyplot
from rl_speed.sampling import Speed
from rl_speed.studies.comparison import pass_rates
from rl_speed.studies.comparison.runs import Run
from rl_speed.studies.simulation.orders import Memory, follow


def load_curves(folders: Mapping[int, Path]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(steps i64[C], rates f64[P, C], tokens of a sample f64[P, C]) from {step: folder of
    experiments/pass_rates.py}.

    Raises ValueError naming the folder whose prompts are others than the first one's, or that has
    no lengths.
    """
    steps, found = sorted(folders), []
    for step in steps:
        found.append(pass_rates.load(folders[step]))
        if "lengths" not in found[-1]:
            raise ValueError(f"{folders[step]}/pass_rates.json has no lengths: measure it again")
        if found[-1].get("ids") != found[0].get("ids"):
            raise ValueError(
                f"{folders[step]}/pass_rates.json is of other prompts than "
                f"{folders[steps[0]]}/pass_rates.json"
            )
    column = lambda name: np.array([x[name] for x in found], np.float64).T
    return np.array(steps), column("rates"), column("lengths")


def predict(
    steps: np.ndarray,
    rates: np.ndarray,
    lengths: np.ndarray,
    rule: Speed,
    groups: int,
    settings: Sequence[Memory],
    every: int,
    seeds: Sequence[int],
) -> dict[str, Any]:
    """Samples and tokens drawn by every `every`-th step, with a shuffle and with memory;
    rates between measurements are linear.

    Args:
      steps, rates, lengths: of `load_curves`; the last step is a multiple of `every`. groups:
        trained on in a step.

    Returns:
      {"steps": i64[K], "shuffle": {"samples", "tokens": f64[K], means over seeds}, "memory": [the
      same for each of the settings]}
    """
    ends = np.arange(every, steps[-1] + 1, every)
    at = lambda values: np.stack([np.interp(ends - every / 2, steps, row) for row in values])
    curves, tokens = at(rates), at(lengths)

    def drawn(memory: Memory | None) -> dict[str, np.ndarray]:
        courses = [
            follow(curves, rule, memory, seed, ends=ends * groups, lengths=tokens) for seed in seeds
        ]
        mean = lambda values: np.mean([np.cumsum(v) for v in values], axis=0)
        return {
            "samples": mean([rule.n_init * c.screened + rule.n_cont * c.groups for c in courses]),
            "tokens": mean([c.tokens for c in courses]),
        }

    return {"steps": ends, "shuffle": drawn(None), "memory": [drawn(memory) for memory in settings]}


def to_targets(
    plain: Sequence[Run],
    others: Sequence[Run],
    targets: Sequence[float],
    steps: np.ndarray,
    ratio: np.ndarray,
) -> list[dict[str, Any]]:
    """For each target accuracy: tokens and steps of every run of either (None: not reached), and
    the ratio plain / other of every seed's tokens; `simulated`, what `ratio`, predicted by each of
    `steps`, is where plain runs reach the target (None: not all do).
    """
    rows = []
    for target in targets:
        (a, b), (i, k) = (
            [[run.reaches(target, x) for run in runs] for runs in (plain, others)]
            for x in ("tokens", "step")
        )
        rows.append(
            {
                "target": target,
                "plain": a,
                "other": b,
                "ratios": [x / y for x, y in zip(a, b) if None not in (x, y)],
                "plain_steps": i,
                "other_steps": k,
                "simulated": None if None in i else float(np.interp(np.mean(i), steps, ratio)),
            }
        )
    return rows


def at_steps(
    plain: Sequence[Run], others: Sequence[Run], steps: Sequence[int], x: str
) -> list[list[float]]:
    """For each step the ratio plain / other of every seed,
    of "tokens" or "samples" drawn by then.
    """
    drawn = lambda run, step: run.records[step - 1][f"total/{x}"]
    return [[drawn(a, step) / drawn(b, step) for a, b in zip(plain, others)] for step in steps]


def screened(runs: Sequence[Run], step: int, since: int) -> dict[str, float]:
    """Means over runs: epochs of visits by `step`; share accepted of the prompts screened after
    step `since`; samples drawn by `step` over those that groups trained on consist of, which is the
    most that any screening could save.
    """
    count = lambda run, name, first: sum(record[name] for record in run.records[first:step])
    return {
        "epochs": float(np.mean([run.records[step - 1]["prompts/epoch"] for run in runs])),
        "accepted": float(
            np.mean(
                [
                    count(r, "rollout/accepted", since)
                    / max(count(r, "rollout/screened", since), 1)
                    for r in runs
                ]
            )
        ),
        "most": float(
            np.mean(
                [
                    r.records[step - 1]["total/samples"] / count(r, "train/sequences", 0)
                    for r in runs
                ]
            )
        ),
    }


def at_the_end(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, Any]]:
    """By label, of every seed: accuracy and tokens at the last step that all runs made,
    and accuracy at as many tokens as all generated.
    """
    everyone = [run for members in runs.values() for run in members]
    step, budget = (min(run.curve(x)[0][-1] for run in everyone) for x in ("step", "tokens"))
    at = lambda run, x, where: float(np.interp(where, *run.curve(x)))
    tokens_at = lambda run: float(np.interp(step, run.curve("step")[0], run.curve("tokens")[0]))
    return {
        label: {
            "accuracy": [at(r, "step", step) for r in members],
            "tokens": [tokens_at(r) for r in members],
            "at_tokens": [at(r, "tokens", budget) for r in members],
            "step": float(step),
            "budget": float(budget),
        }
        for label, members in runs.items()
    }


def longest_unseen(runs: Sequence[Run]) -> float:
    """Epochs (visits / prompts) for which any prompt went unseen in any of the runs,
    as of the end of a step.
    """
    return max(record["prompts/unseen_max"] for run in runs for record in run.records)


HOW = """Plain SPEED (a new shuffle each epoch) against SPEED with memory
(config.data.order="memory"), else the same configuration. Ratios are generated tokens (or samples)
of plain over those with memory: 1.5 means half as many again without memory. Seed by seed; the mean
over seeds, and in brackets the smallest and largest. A target counts as reached where the held-out
curve first crosses it. The simulation runs the same stream, order and rule on the pass rates and
lengths measured along a plain run (seed 0), over the same number of groups; it predicts ratios at
equal steps. It cannot know that memory trains another policy: where a policy needs more or fewer
steps to the same accuracy, the ratio at a target moves away from the simulated one at plain's step,
which is shown beside it. Accepted is the share of the prompts screened since the row above. "At
most" is what screening that never errs would save of plain's samples: all but those of the groups
trained on.

Why it is not more: memory knows nothing of a prompt before its first visit, so that in the first
epoch of visits, in which the policy learns most, it can only come back to what was accepted, after
its rest. Later, when hardly a prompt is still in between, what it saves is the hopeless ones (which
ramble to the length limit, so that tokens gain more than samples) and, as it must see every prompt
within its bound, not all of these."""


def memory_markdown(
    cases: Sequence[Mapping[str, Any]],
    ends: Mapping[str, Mapping[str, Any]],
    command: str,
    made: str,
) -> str:
    """The whole table.md of experiments/memory.py."""
    spread = lambda x, form: (
        f"{np.mean(x):{form}} ({min(x):{form}} to {max(x):{form}})" if len(x) else "not reached"
    )
    reached = lambda x: (
        spread([v / 1e3 for v in x], ",.0f") if None not in x else "not by every seed"
    )
    number = lambda x, form: "not by every seed" if x is None else f"{x:{form}}"
    line = lambda cells: "| " + " | ".join(cells) + " |\n"
    head = lambda cells: line(cells) + line(["---"] * len(cells))
    text = f"# Screening with memory, measured and simulated\n\n`{command}`\n\n{made}\n\n{HOW}\n\n"
    one = next(iter(ends.values()))
    text += head(
        [
            "method",
            f"accuracy at step {one['step']:.0f}",
            "thousand tokens by then",
            f"accuracy at {one['budget'] / 1e3:,.0f} thousand tokens",
        ]
    )
    for name, x in ends.items():
        text += line(
            [
                name,
                spread(x["accuracy"], ".4f"),
                reached(x["tokens"]),
                spread(x["at_tokens"], ".4f"),
            ]
        )
    for case in cases:
        text += (
            f"\n## {case['method']}\n\nNo prompt was unseen for longer than "
            f"{case['unseen']:.2f} epochs (bound {case['bound']:g}).\n\n"
        ) + head(
            [
                "accuracy",
                "thousand tokens, plain",
                "with memory",
                "ratio",
                "simulated",
                "steps, plain / memory",
            ]
        )
        for row in case["targets"]:
            text += line(
                [
                    f"{row['target']:g}",
                    reached(row["plain"]),
                    reached(row["other"]),
                    spread(row["ratios"], ".2f"),
                    number(row["simulated"], ".2f"),
                    " / ".join(
                        number(None if None in row[x] else np.mean(row[x]), ".0f")
                        for x in ("plain_steps", "other_steps")
                    ),
                ]
            )
        text += "\n" + head(
            [
                "step",
                "ratio of samples",
                "simulated",
                "ratio of tokens",
                "simulated",
                "simulated / measured",
                "at most",
                "epochs visited, plain / memory",
                "accepted, plain / memory",
            ]
        )
        for row in case["steps"]:
            cells = [
                cell
                for x in ("samples", "tokens")
                for cell in (spread(row[x]["measured"], ".2f"), f"{row[x]['simulated']:.2f}")
            ]
            a, b = row["plain"], row["memory"]
            text += line(
                [
                    str(row["step"]),
                    *cells,
                    f"{row['tokens']['simulated'] / np.mean(row['tokens']['measured']):.2f}",
                    f"{a['most']:.2f}",
                    *(
                        f"{a[x]:{form}} / {b[x]:{form}}"
                        for x, form in (("epochs", ".2f"), ("accepted", ".3f"))
                    ),
                ]
            )
    return text


def plot_memory(
    runs: Mapping[str, Sequence[Run]],
    measured: Mapping[str, tuple[Sequence[int], Sequence[Sequence[float]]]],
    predicted: Mapping[str, tuple[np.ndarray, np.ndarray]],
    path: Path,
) -> Path:
    """Accuracy over generated tokens, a thin line per seed;
    and ratios of tokens at equal steps, measured and predicted.

    Args:
      runs: by label, the first is plain screening. measured, predicted: by label of the others,
        (steps, ratios).
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for i, (label, members) in enumerate(runs.items()):
        for k, run in enumerate(members):
            left.plot(
                *run.curve("tokens"),
                color=f"C{i}",
                lw=1.0,
                alpha=0.8,
                label=label if not k else None,
            )
    left.set_xlabel("generated tokens")
    left.set_ylabel("held-out accuracy")
    left.legend()
    for i, label in enumerate(measured, 1):
        steps, ratios = measured[label]
        for k, of_seed in enumerate(np.transpose(ratios)):
            right.plot(
                steps,
                of_seed,
                color=f"C{i}",
                lw=1.0,
                alpha=0.8,
                label=f"{label}: measured" if not k else None,
            )
        right.plot(*predicted[label], color=f"C{i}", lw=2.0, ls="--", label=f"{label}: simulated")
    right.axhline(1.0, color="0.6", lw=0.8)
    right.set_xlabel("step: equally many groups trained on")
    right.set_ylabel("generated tokens so far, plain / memory")
    right.legend(fontsize=8)
    figure.savefig(path)
    plt.close(figure)
    return path
