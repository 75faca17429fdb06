"""Tables and pictures of what rules cost on known pass rates."""

import time
from collections.abc import Sequence
from pathlib import Path

from lab.simulation import plots, table
from lab.simulation.curves import load_epochs, moving_average
from lab.simulation.simulate import Limit, epochs, standard_rules, survey
from rl_speed.data.pass_rates import PassRates
from rl_speed.sampling import Speed


class Sources:
    """Pass rates to simulate on: fixed ones, and, where there is a file of them,
    those over training.

    Args:
      over_training: JSON object {prompt: [accuracy of each epoch]}, or None. window: epochs
        averaged around each.

    Attributes:
      curves: f64[prompts, epochs], or None.
    """

    def __init__(self, fixed: PassRates, over_training: str | None, window: int):
        self.fixed = fixed
        self.window = window
        self.name = Path(over_training or "").name
        self.curves = moving_average(load_epochs(over_training), window) if over_training else None


def compare_rules(
    sources: Sources,
    n: int,
    n_inits: Sequence[int],
    groups: int,
    seed: int,
    repeats: int,
    out: Path,
    command: str,
) -> tuple[str, str]:
    """(the table, a line that names the files) of every rule: SPEED with each of `n_inits`,
    and those beside it.
    """
    start = time.perf_counter()
    found = sources.fixed
    curves = sources.curves
    drift = None
    rules = standard_rules(n, tuple(n_inits))
    first = next(rule for rule in rules.values() if isinstance(rule, Speed))
    limits = {
        f"limit, {what} of SPEED {first.n_init}+{first.n_cont}": Limit(first, part)
        for what, part in (("samples", 1.0), ("a tenth of those", 0.1))
    }
    rows = survey({**rules, **limits}, found.rates, n, groups, seed, repeats)
    out.mkdir(parents=True, exist_ok=True)
    if curves is not None:
        drift = epochs(rules, curves, n, seed, repeats)
    source = found.source + (f" ({found.missing:,} without one left out)" if found.missing else "")
    drift_source = (
        ""
        if curves is None
        else (
            f"{sources.name}: {curves.shape[0]:,} prompts, {curves.shape[1]} epochs, each pass "
            f"rate the mean over {sources.window} epochs around it; every rule visits every "
            "prompt once an epoch."
        )
    )
    made = (
        f"{time.strftime('%Y-%m-%d')}, seed {seed}, {repeats} repeats of each prompt; simulated on "
        "a CPU, no policy."
    )
    text = table.markdown(rows, source, n, groups, command, made, drift, drift_source)
    (out / "table.json").write_text(
        table.to_json(
            {
                "command": command,
                "made": made,
                "source": source,
                "prompts": len(found.rates),
                "missing": found.missing,
                "n": n,
                "groups": groups,
                "rows": rows,
                "over_training": drift,
                "over_training_source": drift_source,
            }
        )
    )
    drawn = [
        plots.plot_cost(rows, found.rates, source, out / "cost.png"),
        plots.plot_signal(rows, source, out / "signal.png"),
    ]
    if drift is not None:
        drawn.append(plots.plot_epochs(drift, curves, out / "epochs.png"))
    return _written(text, out, drawn, start)


def _written(text: str, out: Path, drawn: Sequence[Path], start: float) -> tuple[str, str]:
    (out / "table.md").write_text(text)
    return (
        text,
        (
            f"written to {' '.join(map(str, [out / 'table.md', *drawn]))} "
            f"({time.perf_counter() - start:.1f} s)"
        ),
    )
