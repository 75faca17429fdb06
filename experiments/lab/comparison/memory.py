"""Screening with memory, measured on runs beside simulated on pass rates that were measured along
one of them.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from lab.comparison import orders
from lab.comparison.runs import Variant, folder_of, load_run
from lab.simulation import Memory
from lab.simulation.table import to_json
from rl_speed.config import presets

REPEATS = range(8)  # seeds of the simulation


def compare(
    workdir: Path,
    curves: Path,
    out: Path,
    methods: Sequence[str],
    seeds: Sequence[int],
    targets: Sequence[float],
    every: int,
    command: str,
) -> tuple[str, str]:
    """Reads runs and curves, simulates, writes table and picture to `out`:
    (the table, a line that names the files).

    Args:
      workdir: of compare. curves: with stepN/pass_rates.json of the training prompts. methods: of
        the runs, the plain one first.
      targets: held-out accuracies. every: steps between the rows of the second table.

    Raises ValueError, FileNotFoundError: what is missing.
    """
    variants = [Variant(spec) for spec in methods]
    configs = [variant.apply(presets.embedded()) for variant in variants]
    plain, *others = ([load_run(v, s, folder_of(workdir, v, s)) for s in seeds] for v in variants)
    settings = [
        Memory(d.explore, d.max_unseen, d.rest, d.memory_decay)
        for d in (c.data for c in configs[1:])
    ]
    found = {
        int(p.name.removeprefix("step")): p
        for p in curves.glob("step*")
        if p.name.removeprefix("step").isdecimal()
    }
    if not found:
        raise ValueError(
            f"--curves: {curves} has no folders step0, step20, ... of experiments/pass_rates.py"
        )
    predicted = orders.predict(
        *orders.load_curves(found),
        configs[0].make_rule(),
        configs[0].driver.groups,
        settings,
        5,
        REPEATS,
    )
    steps = [int(s) for s in predicted["steps"] if s % every == 0]
    row_of = {int(s): i for i, s in enumerate(predicted["steps"])}
    cases = []
    for variant, config, runs, drawn in zip(variants[1:], configs[1:], others, predicted["memory"]):
        ratio = lambda x: predicted["shuffle"][x] / drawn[x]
        rows = []
        for step in steps:
            both = {
                name: orders.screened(x, step, step - every)
                for name, x in (("plain", plain), ("memory", runs))
            }
            rows.append(
                {
                    "step": step,
                    **both,
                    **{
                        x: {
                            "measured": orders.at_steps(plain, runs, [step], x)[0],
                            "simulated": float(ratio(x)[row_of[step]]),
                        }
                        for x in ("samples", "tokens")
                    },
                }
            )
        cases.append(
            {
                "method": variant.label,
                "unseen": orders.longest_unseen(runs),
                "bound": config.data.max_unseen,
                "targets": orders.to_targets(
                    plain, runs, targets, predicted["steps"], ratio("tokens")
                ),
                "steps": rows,
            }
        )
    labels = [v.label for v in variants]
    ends = orders.at_the_end(dict(zip(labels, (plain, *others))))
    made = (
        f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()}-core CPU, embedded task, "
        f"{configs[0].data.train_prompts:,} prompts, seeds {', '.join(map(str, seeds))}."
    )
    out.mkdir(parents=True, exist_ok=True)
    text = orders.memory_markdown(cases, ends, command, made)
    (out / "table.md").write_text(text)
    (out / "table.json").write_text(
        to_json({"command": command, "made": made, "ends": ends, "cases": cases})
    )
    places = range(5, steps[-1] + 1, 5)
    measured = {
        label: (places, orders.at_steps(plain, runs, places, "tokens"))
        for label, runs in zip(labels[1:], others)
    }
    lines = {
        label: (predicted["steps"], predicted["shuffle"]["tokens"] / drawn["tokens"])
        for label, drawn in zip(labels[1:], predicted["memory"])
    }
    drawn = orders.plot_memory(
        dict(zip(labels, (plain, *others))), measured, lines, out / "memory.png"
    )
    return text, f"written to {out / 'table.md'} {drawn}"
