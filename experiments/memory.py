"""Does screening with memory save what the simulation says? Runs with and without it, and pass rates measured along one of them.

    python experiments/compare.py --config=configs/embedded.py --seeds=0,1,2 --pass_rate_samples=0 --workdir=runs/memory \
        --methods=speed_rloo,speed_rloo@data.order=memory,speed_rloo@data.order=memory@data.rest=0.25
    for s in 20 40 60 80 100 120; do                                     (one run, resumed; its policy after every 20 steps)
        python experiments/train.py --config=configs/embedded.py --config.evaluation.every=0 --config.training.steps=$s \
            --workdir=runs/memory_curves/run && cp -r runs/memory_curves/run/policy runs/memory_curves/policy$s; done
    for s in 0 20 40 60 80 100 120; do
        python experiments/pass_rates.py --config=configs/embedded.py --split=train --samples=32 --out=runs/memory_curves/step$s \
            --config.model.path=$([ $s = 0 ] && echo embedded || echo runs/memory_curves/policy$s); done
    python experiments/memory.py --runs=runs/memory --curves=runs/memory_curves --out=experiments/results/memory \
        --methods=...                                                    (those of the first command, plain screening first)

The last takes seconds, the others 20 minutes on two cores. Writes table.md, table.json and memory.png to --out.
"""

import os
import sys
import time
from pathlib import Path

from absl import app, flags

_RUNS = flags.DEFINE_string("runs", None, "Workdir of experiments/compare.py.", required=True)
_CURVES = flags.DEFINE_string("curves", None, "Folder with stepN/pass_rates.json of the training prompts.", required=True)
_METHODS = flags.DEFINE_list("methods", ["speed_rloo", "speed_rloo@data.order=memory"], "Of the runs; the first is plain.")
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Of the runs.")
_TARGETS = flags.DEFINE_list("targets", ["0.48", "0.51", "0.53", "0.54", "0.55", "0.56", "0.564"], "Held-out accuracies.")
_EVERY = flags.DEFINE_integer("every", 20, "Steps between the rows of the second table.", lower_bound=1)
_OUT = flags.DEFINE_string("out", "experiments/results/memory", "Folder for the table and the picture.")

REPEATS = range(8)  # seeds of the simulation


def main(argv):
    from rl_speed.config import command

    if len(argv) > 1:
        command.fail(f"unexpected argument {argv[1]!r}; every setting is a flag")
    try:
        write_results(Path(_RUNS.value), Path(_CURVES.value), Path(_OUT.value))
    except (ValueError, FileNotFoundError) as error:
        command.fail(str(error))


def write_results(workdir, curves, out):
    """Reads runs and curves, simulates, writes the table and the picture."""
    from rl_speed.config import presets
    from rl_speed.studies.comparison import orders
    from rl_speed.studies.comparison.runs import Variant, load_run
    from rl_speed.studies.simulation import Memory
    from rl_speed.studies.simulation.table import to_json

    seeds = [int(s) for s in _SEEDS.value]
    variants = [Variant(spec) for spec in _METHODS.value]
    configs = [variant.apply(presets.embedded()) for variant in variants]
    plain, *others = ([load_run(v, s, workdir / v.folder / f"seed{s}") for s in seeds] for v in variants)
    settings = [Memory(d.explore, d.max_unseen, d.rest, d.memory_decay) for d in (c.data for c in configs[1:])]
    found = {int(p.name.removeprefix("step")): p for p in curves.glob("step*") if p.name.removeprefix("step").isdecimal()}
    if not found:
        raise ValueError(f"--curves: {curves} has no folders step0, step20, ... of experiments/pass_rates.py")
    predicted = orders.predict(*orders.load_curves(found), configs[0].make_rule(), configs[0].driver.groups, settings, 5, REPEATS)
    steps = [int(s) for s in predicted["steps"] if s % _EVERY.value == 0]
    targets, row_of = [float(t) for t in _TARGETS.value], {int(s): i for i, s in enumerate(predicted["steps"])}
    cases = []
    for variant, config, runs, drawn in zip(variants[1:], configs[1:], others, predicted["memory"]):
        ratio = lambda x: predicted["shuffle"][x] / drawn[x]
        rows = []
        for step in steps:
            both = {name: orders.screened(x, step, step - _EVERY.value) for name, x in (("plain", plain), ("memory", runs))}
            rows.append({"step": step, **both, **{x: {"measured": orders.at_steps(plain, runs, [step], x)[0],
                                                      "simulated": float(ratio(x)[row_of[step]])} for x in ("samples", "tokens")}})
        cases.append({"method": variant.label, "unseen": orders.longest_unseen(runs), "bound": config.data.max_unseen,
                      "targets": orders.to_targets(plain, runs, targets, predicted["steps"], ratio("tokens")), "steps": rows})
    labels = [v.label for v in variants]
    ends = orders.at_the_end(dict(zip(labels, (plain, *others))))
    shown = "python experiments/memory.py " + " ".join(sys.argv[1:])
    made = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()}-core CPU, embedded task, {configs[0].data.train_prompts:,} prompts, " \
           f"seeds {', '.join(_SEEDS.value)}."
    out.mkdir(parents=True, exist_ok=True)
    text = orders.memory_markdown(cases, ends, shown, made)
    (out / "table.md").write_text(text)
    (out / "table.json").write_text(to_json({"command": shown, "made": made, "ends": ends, "cases": cases}))
    every = range(5, steps[-1] + 1, 5)
    measured = {label: (every, orders.at_steps(plain, runs, every, "tokens")) for label, runs in zip(labels[1:], others)}
    lines = {label: (predicted["steps"], predicted["shuffle"]["tokens"] / drawn["tokens"])
             for label, drawn in zip(labels[1:], predicted["memory"])}
    drawn = orders.plot_memory(dict(zip(labels, (plain, *others))), measured, lines, out / "memory.png")
    print(text)
    print("written to", out / "table.md", drawn)


if __name__ == "__main__":
    app.run(main)
