"""A comparison on an embedded task beside what a table of logits predicts; and every method's share
of what an oracle gains.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lab.limit.tabular import (
    EVERY,
    GROUP,
    GROUPS,
    MEASURED,
    SAMPLES,
    Choice,
    Curve,
    Questions,
    fit_rate,
    questions_of,
    train,
)
from rl_speed.config import Data, RuleConfig
from rl_speed.config.methods import METHODS
from rl_speed.data.tasks import TASKS
from rl_speed.runtime.metrics import kind_of, read_object, write_atomically
from rl_speed.runtime.plotting import pyplot

# Learning rates of the table's Adam that the fit may choose from.
RATES = np.geomspace(0.05, 1.6, 21)
# Of predictions: their mean is what is compared.
SEEDS = (0, 1, 2)
# Predicted whether they were run or not: what an oracle should look for.
ALSO = tuple(f"oracle_rloo worth_power={power}" for power in (1.0, 0.5, 0.1))
TRAIN_PROMPTS, EVAL_PROMPTS = 4096, 512
# Predictions are made so far beyond the last accuracy that is asked for.
BEYOND = 0.005
# What is read of a point of a measured curve, each from 0 to this.
POINT = {"optimizer_steps": 2**53, "tokens": 2**53, "eval/accuracy": 1}
_ADVICE = "make it with experiments/compare.py"


def choice_of(label: str) -> Choice | None:
    """Which prompts a method trains on, and its loss, by its label in a comparison; None where the
    table has no such choice.

    Raises ValueError: a change that it knows is to what cannot be.
    """
    method, *changes = label.split(" ")
    # A value may have further "=" in it, and spaces, behind which are no fields of ours.
    fields = dict(change.partition("=")[::2] for change in changes)
    way, _, loss = method.rpartition("_")
    normalise = loss == "dapo"
    if (
        way in ("oracle", "forecast")
        and method in METHODS
        and set(fields) <= {"worth_power", "worth_of"}
    ):
        own = METHODS[method].get("data.worth_power", Data().worth_power)
        power = _number(float, fields.get("worth_power", own))
        if not 0 <= power <= 1 or (way == "oracle" and not power):
            raise ValueError(f"{label!r}: worth_power must be in [0, 1], and not 0 of an oracle")
        of = fields.get("worth_of", Data().worth_of)
        if of not in ("sample", "token"):
            raise ValueError(f"{label!r}: worth_of must be sample or token")
        return Choice(0, power, of == "token", way == "forecast", normalise)
    if way == "speed" and loss in ("rloo", "dapo") and set(fields) <= {"n_init"}:
        screen = _number(int, fields.get("n_init", RuleConfig().n_init))
        if not 2 <= screen < GROUP:
            raise ValueError(
                f"{label!r}: n_init must be an integer from 2 to {GROUP - 1}, of {GROUP} samples"
            )
        return Choice(screen=screen, normalise=normalise)
    # grpo_ada_loss is RLOO's loss but for a constant, which Adam does not see.
    plain = {
        "rloo": Choice(),
        "grpo_ada_loss": Choice(),
        "grpo": Choice(normalise=True, by_sample=True),
        "grpo_dapo_loss": Choice(normalise=True),
        "dapo": Choice(screen=GROUP, normalise=True),
    }
    return None if fields else plain.get(method)


def _number(kind: Callable[[Any], float], text: Any) -> float:
    """NaN where it is none, which lies between no bounds."""
    try:
        return kind(text)
    except ValueError:
        return math.nan


def assumed(choice: Choice) -> dict[str, Any]:
    """The settings that a prediction is for, by field."""
    order = "forecast" if choice.forecast else "oracle" if choice.power else "shuffle"
    fields = {
        "data.train_prompts": TRAIN_PROMPTS,
        "data.eval_prompts": EVAL_PROMPTS,
        "data.order": order,
        "data.keep_low": 0.0,
        "data.keep_high": 1.0,
        "rule.n": GROUP,
        "driver.groups": GROUPS,
    }
    if order != "shuffle":
        of = "token" if choice.by_tokens else "sample"
        fields |= {"data.worth_power": choice.power, "data.worth_of": of}
    if order == "oracle":
        pool = {"every": EVERY, "prompts": MEASURED, "samples": SAMPLES}
        fields |= {f"data.oracle_{name}": value for name, value in pool.items()}
    if order == "forecast":
        names = ("explore", "rest", "forecast_memory", "memory_decay", "forecast_buckets")
        fields |= {f"data.{name}": getattr(Data(), name) for name in names}
    if 0 < choice.screen < GROUP:
        fields |= {"rule.n_init": choice.screen, "rule.low": 0.0, "rule.high": 1.0}
    return fields


def measured_curves(path: Path) -> tuple[str, dict[str, list[Curve]]]:
    """(the task, by label the runs) of a comparison's table.json; one that names no task is from
    before it did, and of the second.

    Raises ValueError: it is damaged, has no curve of plain RLOO, is of a task that is none of ours,
      or of other settings than predictions are for, where it tells any. OSError: it cannot be read.
    """
    found: dict[str, list[Curve]] = {}
    told = read_object(path, _ADVICE)
    if (task := told.get("task", "scratchpad")) not in list(TASKS):
        raise ValueError(f"{path} is of the task {task!r}, and not of {' or '.join(TASKS)}")
    for name, kind in (("curves", list), ("settings", dict)):
        if not isinstance(part := told.get(name, kind()), kind):
            want = "a list" if kind is list else "an object"
            raise ValueError(
                f"{path} is damaged: {name} must be {want}, and is {kind_of(part)}; {_ADVICE}"
            )
    for place, run in enumerate(told.get("curves", [])):
        try:
            label, curve = _curve(run)
            choice = choice_of(label)
        except ValueError as error:
            raise ValueError(f"{path}: curves[{place}]: {error}; {_ADVICE}") from None
        found.setdefault(label, []).append(curve)
        if choice is not None:
            _check_settings(path, label, told.get("settings", {}).get(label, {}), assumed(choice))
    if not any(run.steps.max() > 0 for run in found.get("rloo", [])):
        raise ValueError(
            f"{path} has no runs of rloo that trained, which predictions are fitted to"
        )
    return task, found


def _curve(run: Any) -> tuple[str, Curve]:
    """(its label, the curve) of one of `curves`. Raises ValueError saying what it lacks."""
    if not isinstance(run, dict):
        raise ValueError(f"it must be an object, and is {kind_of(run)}")
    label, points = run.get("method"), run.get("evaluations")
    if not isinstance(label, str):
        raise ValueError(f"method must be a string, and is {kind_of(label)}")
    if not isinstance(points, list) or not points:
        raise ValueError("evaluations must be a list that is not empty")
    for place, point in enumerate(points):
        for name, most in POINT.items():
            value = point.get(name) if isinstance(point, dict) else None
            if type(value) not in (int, float) or not 0 <= value <= most:
                raise ValueError(
                    f"evaluations[{place}] must have a number from 0 to {most} as {name!r}, and "
                    f"has {value!r:.60}"
                )
    return label, Curve(*(np.array([point[name] for point in points], float) for name in POINT))


def _check_settings(path: Path, label: str, told: Any, wanted: Mapping[str, Any]) -> None:
    """Raises ValueError naming the first setting that is told and other than wanted."""
    if not isinstance(told, dict):
        raise ValueError(
            f"{path} is damaged: settings[{label!r}] must be an object, and is {kind_of(told)}; "
            f"{_ADVICE}"
        )
    if told.get("data.eval_prompts") == 0:  # of an embedded task the same as 512
        told = told | {"data.eval_prompts": EVAL_PROMPTS}
    for name, value in wanted.items():
        if (mine := told.get(name, value)) != value:
            raise ValueError(
                f"config.{name}={mine} for {label!r} in {path}, and this predicts for {value}"
            )


def tokens_to(curves: Sequence[Curve], target: float) -> float | None:
    """Mean tokens to an accuracy, over runs; None unless all reach it."""
    found = [curve.reaches(target) for curve in curves]
    return None if not found or None in found else float(np.mean(found))


def baseline_of(label: str, labels: Sequence[str]) -> tuple[str | None, str | None]:
    """(the method that chooses nothing, the oracle) of the same loss, as far as they were run."""
    loss = "rloo" if label.split(" ")[0].endswith("rloo") else "dapo"
    plain = ("rloo",) if loss == "rloo" else ("grpo_dapo_loss", "dapo")
    oracle = f"oracle_{loss}"
    return next((m for m in plain if m in labels), None), oracle if oracle in labels else None


def shares(
    curves: Mapping[str, Sequence[Curve]], targets: Sequence[float]
) -> dict[str, list[dict[str, float | None]]]:
    """By label and target: tokens, how many times fewer than the plain method of the same loss, and
    the share of the oracle's gain; None where something was not reached or gains nothing.
    """
    found: dict[str, list[dict[str, float | None]]] = {}
    for label, runs in curves.items():
        if not label.split(" ")[0].endswith(("rloo", "dapo")):
            continue
        plain, oracle = baseline_of(label, list(curves))
        found[label] = []
        for target in targets:
            mine = tokens_to(runs, target)
            base = tokens_to(curves[plain], target) if plain else None
            best = tokens_to(curves[oracle], target) if oracle else None
            ratio = base / mine if base and mine else None
            limit = base / best if base and best else None
            share = (ratio - 1) / (limit - 1) if ratio and limit and limit > 1 else None
            found[label].append({"target": target, "tokens": mine, "ratio": ratio, "share": share})
    return found


def predict(
    steps: Mapping[str, int], until: float, rate: float, training: Questions, held_out: Questions
) -> dict[str, list[Curve]]:
    """The table's curves, of so many steps or up to an accuracy, of every label that it has a
    choice for.
    """
    choices = {label: choice_of(label) for label in steps}
    return {
        label: [
            train(choice, training, held_out, rate, seed, steps[label], until=until)
            for seed in SEEDS
        ]
        for label, choice in choices.items()
        if choice is not None
    }


def compare(comparison: Path, targets: Sequence[float], out: Path, command: str) -> tuple[str, str]:
    """(the page as text, a line that names the files); writes table.md, table.json, limit.png.

    Args:
      comparison: table.json of experiments/compare.py on an embedded task. targets: held-out
        accuracies.

    Raises ValueError, OSError: the comparison cannot be read, or lacks plain RLOO.
    """
    task, curves = measured_curves(comparison)
    texts = lambda split, size: [q.text for q in TASKS[task].questions(split, 0, size)]
    training = questions_of(task, texts("train", TRAIN_PROMPTS))
    held_out = questions_of(task, texts("eval", EVAL_PROMPTS))
    fitted = [(run.steps, run.accuracy) for run in curves["rloo"]]
    rate, left = fit_rate(fitted, training, held_out, RATES)
    # No further: who screens looks ever longer for what is left to learn.
    steps = {label: int(max(run.steps.max() for run in runs)) for label, runs in curves.items()}
    also = {label: steps["rloo"] for label in ALSO if label not in curves}
    predicted = predict(steps | also, max(targets) + BEYOND, rate, training, held_out)
    rows = [
        {"method": label, **row}
        for label in predicted
        if label != "rloo"
        for row in _rows(label, predicted, curves, targets)
    ]
    found = shares(curves, targets)
    numbers = {
        "command": command,
        "task": task,
        "rate": rate,
        "left": left,
        "predictions": rows,
        "shares": found,
    }
    text = _markdown(numbers, targets)
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "table.json", json.dumps(numbers, indent=1) + "\n")
    write_atomically(out / "table.md", text)
    _plot(predicted, curves, out / "limit.png")
    return text, f"written to {out / 'table.md'} {out / 'table.json'} {out / 'limit.png'}"


def _rows(label, predicted, curves, targets) -> list[dict[str, Any]]:
    rows = []
    for target in targets:
        ratio = []
        for of in (predicted, curves):
            base, mine = tokens_to(of["rloo"], target), tokens_to(of.get(label, []), target)
            ratio.append(base / mine if base and mine else None)
        off = ratio[0] / ratio[1] - 1 if None not in ratio else None
        rows.append({"target": target, "predicted": ratio[0], "measured": ratio[1], "off": off})
    return rows


def _markdown(numbers: Mapping[str, Any], targets: Sequence[float]) -> str:
    show = lambda x, form: "-" if x is None else format(x, form)
    head = " | ".join(f"{target:g}" for target in targets)
    lines = [
        "# What choosing prompts can gain\n",
        f"`{numbers['command']}`\n",
        "Tokens to a held-out accuracy, as how many times fewer than plain RLOO takes: predicted "
        "with a policy that is a table of logits (one for each entry that it may get wrong), whose "
        f"Adam has the rate {numbers['rate']:.3f} that fits RLOO's own measured curve best (root "
        f"mean square {numbers['left']:.3f} of accuracy), and nothing else fitted; then measured; "
        "then the prediction over what was measured, less one.\n",
        "| method | held-out accuracy | predicted | measured | off by |",
        "|---|---|---|---|---|",
    ]
    for row in numbers["predictions"]:
        lines.append(
            f"| {row['method']} | {row['target']:g} | {show(row['predicted'], '.2f')} | "
            f"{show(row['measured'], '.2f')} | {show(row['off'], '+.0%')} |"
        )
    lines += [
        "\nMeasured: thousands of tokens to each accuracy, mean over seeds, where all reach it; "
        "times fewer than the method of the same loss that chooses none (rloo; grpo_dapo_loss "
        "where it was run, else dapo); share of the oracle's gain.\n",
        f"| method | {head} |",
        "|---|" + "---|" * len(targets),
    ]
    for label, cells in numbers["shares"].items():
        texts = [
            "-"
            if cell["tokens"] is None
            else f"{cell['tokens'] / 1000:,.0f}"
            + (f", {cell['ratio']:.2f}x" if cell["ratio"] else "")
            + (f", {cell['share']:.0%}" if cell["share"] is not None else "")
            for cell in cells
        ]
        lines.append(f"| {label} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _plot(predicted, curves, path: Path) -> Path:
    plt = pyplot()
    figure, axes = plt.subplots(
        1, 2, figsize=(12, 5), constrained_layout=True, sharex=True, sharey=True
    )
    longest = max(run.tokens.max() for label in predicted for run in curves.get(label, []))
    for axis, of, title in zip(axes, (curves, predicted), ("measured", "predicted by the table")):
        for i, label in enumerate(predicted):
            if label not in curves:
                continue
            at = np.linspace(0, min(longest, *(run.tokens.max() for run in of[label])), 100)
            mean = np.mean([np.interp(at, run.tokens, run.accuracy) for run in of[label]], axis=0)
            # Ten colours, then again with another line.
            style = {"color": f"C{i % 10}", "ls": "-" if i < 10 else "--"}
            axis.plot(at / 1e6, mean, label=label, **style)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("sampled tokens, millions")
    # Both as far as what was predicted goes, and a little beyond.
    axes[0].set_xlim(0, 1.2e-6 * max(r.tokens.max() for runs in predicted.values() for r in runs))
    axes[0].set_ylabel("held-out accuracy")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path)
    plt.close(figure)
    return path
