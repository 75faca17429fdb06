"""Run several methods from the same start with the same seeds, and tabulate the time to a target accuracy.

    python experiments/compare.py --config=configs/embedded.py --methods=speed_rloo,rloo,speed_dapo,dapo \
        --seeds=0,1,2 --workdir=runs/compare            (Table 1 and Figure 4 of the SPEED paper; about 15 minutes)
    python experiments/compare.py --config=configs/embedded.py --workdir=runs/n_init \
        --methods=speed_rloo@rule.n_init=4,speed_rloo@rule.n_init=6,speed_rloo@rule.n_init=8,rloo   (Figure 5)

A method may carry changes of its own: NAME@section.field=value. Writes table.md, table.json, accuracy.png, training.png and
pass_rates.* to --workdir, a folder per run beside them. Interrupted comparisons continue where they stopped.
"""

import json
import os
import sys
import time
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", None, "Settings that all methods share.", lock_config=True)
_METHODS = flags.DEFINE_list("methods", ["speed_rloo", "rloo"], "Methods to run; see rl_speed/config/methods.py.")
_SEEDS = flags.DEFINE_list("seeds", ["0"], "Seeds, each used by every method.")
_TARGET = flags.DEFINE_float("target", 0.0, "Held-out accuracy; 0 takes nine tenths of the way from the start to the best "
                             "mean final accuracy among the methods that do not screen.")
_SAMPLES = flags.DEFINE_integer("pass_rate_samples", 50, "Samples per held-out prompt for the starting histogram; 0: none.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Where everything is written.", required=True)
flags.mark_flag_as_required("config")


def main(_):
    import copy

    import jax
    import numpy as np

    from rl_speed.studies.comparison import budgets, pass_rates, plots, runs, table
    from rl_speed.runtime.setup import setup_jax

    setup_jax()
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)
    workdir = Path(_WORKDIR.value)
    variants = [runs.Variant(spec) for spec in _METHODS.value]
    command = "python experiments/compare.py " + " ".join(sys.argv[1:])
    try:
        done = runs.run_all(lambda: copy.deepcopy(_CONFIG.value), variants, [int(s) for s in _SEEDS.value], workdir)
        rates = None
        if _SAMPLES.value:
            if not (workdir / "pass_rates.json").exists():
                pass_rates.save(*pass_rates.measure(copy.deepcopy(_CONFIG.value), _SAMPLES.value), workdir, command)
            rates = pass_rates.load(workdir)["rates"]
    except (ValueError, FileNotFoundError) as error:
        logging.error("%s", error)
        sys.exit(2)
    grouped = table.group_runs(done)
    start = float(np.mean([run.curve("step")[1][0] for run in done]))
    target = _TARGET.value
    if not target:
        plain = [v for v in grouped if v.baseline is None] or list(grouped)
        best = max(np.mean([run.curve("step")[1][-1] for run in grouped[v]]) for v in plain)
        target = round(start + 0.9 * (float(best) - start), 3)
    rows = table.time_to_target(done, target)
    rules = {v.spec: (c.rule.n_init, c.rule.n - c.rule.n_init) for v in variants if v.baseline
             for c in [v.apply(copy.deepcopy(_CONFIG.value))]}
    predicted = table.predictions(grouped, rates, rules, target) if rates is not None else []
    phase_rows = {v.label: table.phases(members, target) for v, members in grouped.items()}
    machine = (f"{time.strftime('%Y-%m-%d')}, {jax.devices()[0].device_kind}, {os.cpu_count()} processors, JAX "
               f"{jax.__version__}, seeds {', '.join(_SEEDS.value)}.")
    limits, budget_rows = budgets.at_budgets(done)
    text = "\n".join([table.markdown(rows, target, start, predicted, phase_rows, command, machine),
                      budgets.markdown(limits, budget_rows)])
    (workdir / "table.md").write_text(text)
    curves = [{"method": run.variant.label, "seed": run.seed, "evaluations": run.summary["evaluations"]} for run in done]
    (workdir / "table.json").write_text(json.dumps(
        {"command": command, "machine": machine, "target": target, "start": start, "rows": rows, "predictions": predicted,
         "phases": phase_rows, "budgets": {"limits": limits, "rows": budget_rows}, "curves": curves}, indent=1) + "\n")
    drawn = [plots.plot_accuracy(done, target, workdir / "accuracy.png"), plots.plot_training(done, workdir / "training.png"),
             budgets.plot_budgets(limits, budget_rows, start, workdir / "budgets.png")]
    if any(v.baseline in {w.spec for w in grouped} for v in grouped):
        drawn.append(plots.plot_speedup(done, start, target, workdir / "speedup.png"))
    print(text)
    print("written to", workdir / "table.md", *drawn)


if __name__ == "__main__":
    from rl_speed.config.command import parse_flags

    app.run(main, flags_parser=parse_flags)
