"""What would each sampling rule cost on your prompts? Every rule on measured pass rates, before a policy runs (seconds, CPU).

    python experiments/simulate.py                                  (without a file: a stated synthetic mixture)
    python experiments/simulate.py --pass_rates=DATA/deepscaler/deepscaler_40k.jsonl.gz \
        --over_training=DATA/deepscaler/acc_step_500.json

With --orders: what screening with memory (config.data.order="memory") saves over a shuffle (half a minute), on the pass rates over
training and on the fixed ones.

    python experiments/simulate.py --orders --pass_rates=DATA/deepscaler/deepscaler_40k.jsonl.gz \
        --over_training=DATA/deepscaler/acc_step_500.json --out=experiments/results/simulate_memory

Writes table.md, table.json, cost.png, signal.png and, with --over_training, epochs.png to --out. Takes what
experiments/pass_rates.py measured (pass_rates.json) as well. With --orders: table.md, table.json, orders.png.
"""

import sys
import time
from pathlib import Path

from absl import app, flags

_PASS_RATES = flags.DEFINE_string("pass_rates", None, "Pass rates: .jsonl[.gz], a .json array of rows, or pass_rates.json.")
_FIELD = flags.DEFINE_string("field", None, "Field of a row with its pass rate or difficulty; default: the one that looks like it.")
_SCALE = flags.DEFINE_string("scale", None, "What it says of the pass rate p: rate p, percent 100 p, failure 1 - p, difficulty "
                             "100 (1 - p); default: by the field's name.")
_OVER_TRAINING = flags.DEFINE_string("over_training", None, "JSON object {prompt: [accuracy of each epoch]}.")
_WINDOW = flags.DEFINE_integer("window", 5, "Epochs averaged around each (odd): few tries put too many prompts at 0 and 1.")
_N = flags.DEFINE_integer("n", 24, "Samples of a group.")
_N_INIT = flags.DEFINE_list("n_init", ["4", "6", "8"], "SPEED's screening samples, one rule each.")
_GROUPS = flags.DEFINE_integer("groups", 16, "Groups of a batch.")
_SEED = flags.DEFINE_integer("seed", 0, "Seed; the same one gives the same numbers.", lower_bound=0)
_REPEATS = flags.DEFINE_integer("repeats", 4, "Times that every prompt is simulated; at least 2 for standard errors.")
_ORDERS = flags.DEFINE_bool("orders", False, "Compare orders of prompts instead of rules.")
_OUT = flags.DEFINE_string("out", "experiments/results/simulate", "Folder for the table and the pictures.")
# Fixed pass rates are visited so often, and only so many of them: more change no ratio by as much as its error.
STATIC_PROMPTS, STATIC_EPOCHS = 4096, 4
# Pass rates over training are also taken as those of a policy that learns so many times faster: memory is then older.
FASTER = 10


def main(argv):
    from rl_speed.config import command
    from rl_speed.studies import simulation
    from rl_speed.studies.simulation import plots, table

    if len(argv) > 1:
        command.fail(f"unexpected argument {argv[1]!r}; every setting is a flag")
    start, curves, drift = time.perf_counter(), None, None
    n, seed, repeats, out = _N.value, _SEED.value, _REPEATS.value, Path(_OUT.value)
    try:
        if not all(k.strip().isdecimal() for k in _N_INIT.value) or not _N_INIT.value:
            raise ValueError(f"n_init must be whole numbers with commas between, got {','.join(_N_INIT.value)!r}")
        rules = simulation.standard_rules(n, tuple(int(k) for k in _N_INIT.value))
        if _PASS_RATES.value:
            found = simulation.load_pass_rates(_PASS_RATES.value, _FIELD.value, _SCALE.value)
        else:
            found = simulation.mixture(seed=seed)
        if _OVER_TRAINING.value:
            curves = simulation.moving_average(simulation.load_epochs(_OVER_TRAINING.value), _WINDOW.value)
        if _ORDERS.value:
            return compare_orders(found, curves, tuple(dict.fromkeys(int(k) for k in _N_INIT.value)), start)
        rows = simulation.survey(rules, found.rates, n, _GROUPS.value, seed, repeats)
        out.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        command.fail(str(error))
    except OSError as error:
        command.fail(f"{error}; --out=FOLDER writes elsewhere")
    if curves is not None:
        drift = simulation.epochs(rules, curves, n, seed, repeats)
    source = found.source + (f" ({found.missing:,} without one left out)" if found.missing else "")
    drift_source = "" if curves is None else (
        f"{Path(_OVER_TRAINING.value).name}: {curves.shape[0]:,} prompts, {curves.shape[1]} epochs, each pass rate the mean over "
        f"{_WINDOW.value} epochs around it; every rule visits every prompt once an epoch.")
    shown = table.shown_command("experiments/simulate.py", sys.argv[1:])
    made = f"{time.strftime('%Y-%m-%d')}, seed {seed}, {repeats} repeats of each prompt; simulated on a CPU, no policy."
    text = table.markdown(rows, source, n, _GROUPS.value, shown, made, drift, drift_source)
    (out / "table.md").write_text(text)
    (out / "table.json").write_text(table.to_json({
        "command": shown, "made": made, "source": source, "prompts": len(found.rates), "missing": found.missing, "n": n,
        "groups": _GROUPS.value, "rows": rows, "over_training": drift, "over_training_source": drift_source}))
    drawn = [plots.plot_cost(rows, found.rates, source, out / "cost.png"), plots.plot_signal(rows, source, out / "signal.png")]
    if drift is not None:
        drawn.append(plots.plot_epochs(drift, curves, out / "epochs.png"))
    print(text)
    print("written to", out / "table.md", *drawn, f"({time.perf_counter() - start:.1f} s)")


def compare_orders(found, curves, n_inits, start):
    """The other table: a shuffle against screening with memory."""
    import numpy as np

    from rl_speed.studies import simulation
    from rl_speed.studies.simulation import plots, table

    n, seed, repeats, out = _N.value, _SEED.value, _REPEATS.value, Path(_OUT.value)
    some = np.random.default_rng(seed).permutation(found.rates)[:STATIC_PROMPTS]
    sources, name = {}, Path(_OVER_TRAINING.value or "").name
    if curves is not None:
        prompts, epochs = curves.shape
        sources[f"{name}: {prompts:,} prompts over {epochs} epochs of training (means over {_WINDOW.value})"] = curves
        if epochs > FASTER:
            sources[f"{name}, every {FASTER}th epoch: learning {FASTER} times faster"] = curves[:, ::FASTER]
    sources[f"{len(some):,} of {found.source}, fixed, {STATIC_EPOCHS} epochs"] = np.tile(some[:, None], (1, STATIC_EPOCHS))
    cases = simulation.survey_orders(sources, n, n_inits, seed, repeats)
    out.mkdir(parents=True, exist_ok=True)
    shown = table.shown_command("experiments/simulate.py", sys.argv[1:])
    made = f"{time.strftime('%Y-%m-%d')}, seed {seed}; simulated on a CPU, no policy."
    text = table.orders_markdown(cases, n, repeats, shown, made)
    (out / "table.md").write_text(text)
    (out / "table.json").write_text(table.to_json({"command": shown, "made": made, "n": n, "repeats": repeats, "cases": cases}))
    drawn = plots.plot_orders(cases, out / "orders.png")
    print(text)
    print("written to", out / "table.md", drawn, f"({time.perf_counter() - start:.1f} s)")


if __name__ == "__main__":
    app.run(main)
