"""Writes table.md, summary.json and plot.png of an evaluation."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.evaluation.measures import BINS
from rl_speed.runtime.metrics import write_atomically
from rl_speed.runtime.plotting import pyplot

SAME = "95%: same questions, other responses"
OTHER = "95%: other questions like these"
AVERAGES = {"macro_average": "average of benchmarks", "weighted_average": "average of questions"}


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table with aligned columns; the first row is the header."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |"
        for row in rows
    ]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def label(k: int, samples: int) -> str:
    """Name of pass@k in tables; pass@1 is the mean share of correct responses."""
    return f"average@{samples} (pass@1)" if k == 1 else f"pass@{k}"


def _pass_rows(
    name: str, questions: str, table: Mapping[str, Any], k: Iterable[int], samples: int
) -> list[list[str]]:
    rows = []
    for j in sorted({1, *k}):
        cell = table[str(j)]
        first = not rows

        def interval(kind):
            return "{:.4f} to {:.4f}".format(*cell[kind])

        rows.append(
            [
                name if first else "",
                questions if first else "",
                label(j, samples),
                f"{cell['value']:.4f}",
                interval("same_questions"),
                interval("other_questions"),
            ]
        )
    return rows


def _responses_row(name: str, b: Mapping[str, Any]) -> list[str]:
    return [
        name,
        f"{b['length_mean']:.1f}",
        f"{b['length_p95']:.0f}",
        *(f"{b[key]:.4f}" for key in ("truncated", "no_answer", "ungraded")),
    ]


def tables(summary: Mapping[str, Any]) -> str:
    """Markdown tables of accuracy, responses, pass rates and classes, without a heading."""
    k = summary["k"]
    benchmarks = summary["benchmarks"]
    samples = next(iter(benchmarks.values()))["samples"]
    rows = [["benchmark", "questions", "measure", "value", SAME, OTHER]]
    for name, b in benchmarks.items():
        rows += _pass_rows(name, str(b["questions"]), b["pass_at"], k, samples)
    if len(benchmarks) > 1:
        for key, name in AVERAGES.items():
            rows += _pass_rows(name, "", summary[key], k, samples)
    lines = aligned(rows)
    lines += [
        "",
        *aligned(
            [
                [
                    "benchmark",
                    "tokens, mean",
                    "95th percentile",
                    "truncated",
                    "no answer",
                    "not graded",
                ],
                *(_responses_row(name, b) for name, b in benchmarks.items()),
            ]
        ),
    ]
    lines += [
        "",
        "Questions by measured pass rate:",
        "",
        *aligned(
            [
                ["benchmark", *BINS],
                *(
                    [name, *(str(b["pass_rate_bins"][i]) for i in BINS)]
                    for name, b in benchmarks.items()
                ),
            ]
        ),
    ]
    for name, b in benchmarks.items():
        for field, values in b["classes"].items():
            rows = [[f"{name}, by {field}", "questions", "measure", "value", SAME, OTHER]]
            for value, part in values.items():
                rows += _pass_rows(value, str(part["questions"]), part["pass_at"], k, samples)
            lines += ["", *aligned(rows)]
    left_out = [
        f"{name}: {n} {what.replace('_', ' ')}"
        for name, b in benchmarks.items()
        for what, n in b["left_out"].items()
        if n
    ]
    return (
        "\n".join([*lines, *(["", "Left out: " + ", ".join(left_out) + "."] if left_out else [])])
        + "\n"
    )


def suite_table(scores: Mapping[str, Mapping[str, Any]]) -> str:
    """Formats a Markdown table with a row for each policy and a column for each benchmark, in
    percent.

    Args:
      scores: policy -> benchmark -> its `measures.measure`; the same benchmarks for every policy.
    """
    sets = next(iter(scores.values()))
    counts = np.array([one["questions"] for one in sets.values()])
    heads = [
        f"{name} (average@{one['samples']})" if one["samples"] > 1 else name
        for name, one in sets.items()
    ]
    lines = [
        "| policy | " + " | ".join([*heads, "average", "by question"]) + " |",
        "|---" * (3 + len(sets)) + "|",
    ]
    for policy, found in scores.items():
        values = 100 * np.array([found[name]["pass_at"]["1"]["value"] for name in sets])
        means = values.mean(), (values * counts).sum() / counts.sum()
        lines.append(f"| {policy} | " + " | ".join(f"{x:.1f}" for x in (*values, *means)) + " |")
    return "\n".join(lines) + "\n"


def plot(summary: Mapping[str, Any], path: Path) -> Path:
    """Plot pass@k over k by benchmark, and accuracy by class (of each benchmark's first class
    field), with intervals.
    """
    plt = pyplot()
    benchmarks = summary["benchmarks"]
    with_classes = {
        name: next(iter(b["classes"].items())) for name, b in benchmarks.items() if b["classes"]
    }
    bars = max(1, sum(len(values) for _, values in with_classes.values()))
    figure, axes = plt.subplots(
        1,
        2,
        figsize=(6 + min(7.5, 2.5 + 0.55 * bars), 3.8),
        constrained_layout=True,
        width_ratios=[6, min(7.5, 2.5 + 0.55 * bars)],
    )
    for name, b in benchmarks.items():
        k = np.array([int(j) for j in b["pass_at"]])
        (line,) = axes[0].plot(
            k,
            [c["value"] for c in b["pass_at"].values()],
            marker="o",
            ms=3,
            label=f"{name} ({b['questions']} questions)",
        )
        for kind, alpha in (("other_questions", 0.12), ("same_questions", 0.3)):
            low, high = np.array([c[kind] for c in b["pass_at"].values()]).T
            axes[0].fill_between(k, low, high, color=line.get_color(), alpha=alpha, lw=0)
    axes[0].set_xscale("log", base=2)
    axes[0].set_xticks(k, [str(j) for j in k])
    axes[0].set_ylim(0, 1)
    axes[0].set_xlabel("k")
    axes[0].set_ylabel("pass@k")
    axes[0].set_title("dark: same questions, other responses; light: other questions", fontsize=9)
    axes[0].legend(fontsize=8)
    ticks = []
    at = 0
    for i, name in enumerate(benchmarks):
        if name not in with_classes:
            continue
        for value, part in with_classes[name][1].items():
            cell = part["pass_at"]["1"]
            axes[1].bar(at, cell["value"], color=f"C{i}", alpha=0.75)
            low, high = cell["other_questions"]
            axes[1].errorbar(
                at,
                cell["value"],
                [[cell["value"] - low], [high - cell["value"]]],
                color="0.2",
                capsize=3,
                lw=1,
            )
            ticks.append((at, f"{value}\n({part['questions']})"))
            at += 1
        at += 0.6
    if ticks:
        turn = {"rotation": 40, "ha": "right"} if bars > 6 else {}
        axes[1].set_xticks([x for x, _ in ticks], [text for _, text in ticks], fontsize=8, **turn)
        axes[1].set_ylim(0, 1)
        fields = ", ".join(dict.fromkeys(field for field, _ in with_classes.values()))
        axes[1].set_title(
            f"average accuracy by {fields} (bars: other questions like these)", fontsize=9
        )
    else:
        axes[1].set_visible(False)
    figure.savefig(path)
    plt.close(figure)
    return path


def write_results(
    summary: Mapping[str, Any], folder: Path, title: str, facts: Mapping[str, Any]
) -> list[Path]:
    """Write table.md, summary.json and plot.png in `folder`. Returns the files.

    Args:
      facts: command, date, device and the like, for table.md and summary.json.
    """
    head = [
        f"# {title}",
        "",
        f"`{facts['command']}`",
        "",
        ", ".join(str(v) for n, v in facts.items() if n != "command") + ".",
        "",
        (
            "There are two kinds of intervals: for other responses to the same questions, and for "
            "other questions of the same kind (rl_speed/evaluation/intervals.py)."
        ),
        "",
    ]
    write_atomically(folder / "table.md", "\n".join(head) + "\n" + tables(summary))
    write_atomically(folder / "summary.json", json.dumps({**facts, **summary}, indent=1) + "\n")
    return [folder / "table.md", folder / "summary.json", plot(summary, folder / "plot.png")]
