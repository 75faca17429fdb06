"""An ablation at the embedded scale is data: variants of named methods,
what is tabulated of them, what is drawn.

`run` trains what is not trained yet, seed by seed, and writes table.md, table.json and plot.png.
"""

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.config import Config, Data, Replay
from rl_speed.config.presets import embedded, tiny
from rl_speed.replay.responses import load_responses
from rl_speed.runtime.plotting import pyplot
from rl_speed.studies.comparison import pass_rates
from rl_speed.studies.comparison.measures import Bars, Column, Curve
from rl_speed.studies.comparison.runs import Run, Variant, run_all
from rl_speed.studies.comparison.table import group_runs
from rl_speed.training.cache_start import write_cache

# As the value of data.pass_rates or replay.cache: a file that the ablation makes first, one a seed,
# with the starting policy.
MEASURED = "measured"


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of the paper and what stands for its columns here."""

    title: str
    columns: tuple[Column, ...]


@dataclasses.dataclass(frozen=True)
class Ablation:
    """What is run, on the embedded preset, and what is told of it.

    Attributes:
      name: of its script, and of its folder under runs/ablations/.
      source: paper, and its tables and figures.
      variants: label -> a `Variant` spec, "speed_rloo@rule.n_init=6".
      tables, panels: all from the same runs.
      settings: fields that every variant shares and that differ from the preset; set before a
        variant's method is.
      steps: RL steps of a run.
      rate_samples: responses to each training prompt, where data.pass_rates is "measured".
    """

    name: str
    title: str
    source: str
    variants: Mapping[str, str]
    tables: tuple[Table, ...]
    panels: tuple[Curve | Bars, ...]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    steps: int = 120
    rate_samples: int = 32

    def config(self, steps: int = 0) -> Config:
        """What all variants share, of `steps` steps (0: those of the ablation)."""
        config = embedded()
        for path, value in self.settings.items():
            section, leaf = path.split(".")
            if not hasattr(getattr(config, section), leaf):
                raise ValueError(f"ablation {self.name}: there is no config.{path}")
            setattr(getattr(config, section), leaf, value)
        config.training.steps = steps or self.steps
        config.evaluation.every = min(config.evaluation.every, config.training.steps)
        return config


def shrink(config: Config) -> None:
    """To a size that shows whether it runs, in seconds: 16 rows a batch, 2 steps.

    The numbers mean nothing.
    """
    tiny(
        config,
        2,
        groups=2,
        screen=16,
        slots=32,
        prefill=4,
        train_prompts=64,
        eval_prompts=16,
        evaluate_every=1,
        export=config.logging.export,
    )
    config.rule.n_max, config.rule.m, config.rule.rounds = 8, 4, 2
    config.driver.buffer_groups = 32
    config.evaluation.samples = min(config.evaluation.samples, 4)


def make_files(config: Config, folder: Path, rate_samples: int) -> None:
    """Put the paths of files in place of "measured", and make those that are not in `folder` yet.

    data.pass_rates: `rate_samples` responses of the starting policy to every training prompt.
    replay.cache: one response.
    """
    if MEASURED not in (config.data.pass_rates, config.replay.cache):
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Seeds have training prompts of their own.
    suffix = f"{config.data.train_prompts}_seed{config.seed}"
    # What is measured does not depend on what the variant makes of it: randomness is keyed by
    # prompt and sample alone.
    plain = copy.deepcopy(config)
    plain.replay = Replay()
    plain.data = Data(
        max_prompt_length=config.data.max_prompt_length, train_prompts=config.data.train_prompts
    )
    if config.data.pass_rates == MEASURED:
        path = folder / f"pass_rates_{suffix}" / "pass_rates.json"
        if not path.exists():
            pass_rates.save(
                pass_rates.measure(plain, rate_samples, "train"),
                path.parent,
                f"{rate_samples} samples a prompt",
            )
        config.data.pass_rates = str(path)
    if config.replay.cache == MEASURED:
        path = folder / f"cache_{suffix}.npz"
        if not path.exists():
            write_cache(plain, path)
        config.replay.cache = str(path)


def start_cost(name: str, scale: float = 1.0) -> Callable[[Run], float]:
    """A field of `training.cache_start.StartCost` of the measured cache that a run started from,
    divided by `scale`; 0 for a run without one.
    """

    def value(run: Run) -> float:
        if not (path := run.config["replay"]["cache"]):
            return 0.0
        return float(load_responses(path)[1]["cost"][name]) / scale

    return value


def summarise(values: Sequence[float | None]) -> dict[str, Any]:
    """{"values", "mean", "min", "max"}; the latter are None unless every seed has the number."""
    if None in values:
        return {"values": list(values), "mean": None, "min": None, "max": None}
    return {
        "values": list(values),
        "mean": float(np.mean(values)),
        "min": min(values),
        "max": max(values),
    }


def table_rows(table: Table, grouped: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """A row a variant: its label, and for each column's title `summarise` over seeds."""
    return [
        {
            "variant": label,
            **{c.title: summarise([c.value(run) for run in runs]) for c in table.columns},
        }
        for label, runs in grouped.items()
    ]


def panel_data(
    panel: Curve | Bars, grouped: Mapping[str, Sequence[Run]]
) -> dict[str, dict[str, Any]]:
    """What a panel draws, by label: {"x", "mean", "min", "max"} point by point over seeds (x is
    their mean, cut to the seed with the fewest points), or `summarise` of one number a seed.
    """
    if isinstance(panel, Bars):
        return {
            label: summarise([panel.value(run) for run in runs]) for label, runs in grouped.items()
        }
    drawn = {}
    for label, runs in grouped.items():
        curves = [panel.points(run) for run in runs]
        shortest = min(len(x) for x, _ in curves)
        x, y = (np.stack([curve[i][:shortest] for curve in curves]) for i in (0, 1))
        lists = {"x": x.mean(0), "mean": y.mean(0), "min": y.min(0), "max": y.max(0)}
        drawn[label] = {
            name: [float(f"{value:.5g}") for value in values] for name, values in lists.items()
        }
    return drawn


def cell(entry: Mapping[str, Any], digits: int) -> str:
    """ "0.561 (0.550 to 0.570)": mean, smallest and largest of the seeds;
    the mean alone for one seed; else how many have it.
    """
    show = lambda value: f"{value:,.{digits}f}"
    if entry["mean"] is None:
        return f"{sum(v is not None for v in entry['values'])} of {len(entry['values'])} seeds"
    return show(entry["mean"]) + (
        f" ({show(entry['min'])} to {show(entry['max'])})" if len(entry["values"]) > 1 else ""
    )


def markdown(ablation: Ablation, rows: Sequence[Sequence[dict]], command: str, machine: str) -> str:
    """The whole table.md; `rows` as from `table_rows`, one list a table."""
    lines = [
        f"# {ablation.title}",
        "",
        f"Source: {ablation.source}.",
        "",
        f"`{command}`",
        "",
        machine,
        "",
        (
            "Mean over seeds, in brackets the smallest and the largest. Wall-clock is without "
            "evaluation, checkpoints and compilation."
        ),
    ]
    for table, entries in zip(ablation.tables, rows):
        lines += [
            "",
            f"## {table.title}",
            "",
            "| variant | " + " | ".join(c.title for c in table.columns) + " |",
            "|---" * (1 + len(table.columns)) + "|",
        ]
        lines += [
            f"| {row['variant']} | "
            + " | ".join(cell(row[c.title], c.digits) for c in table.columns)
            + " |"
            for row in entries
        ]
    return (
        "\n".join(
            [
                *lines,
                "",
                "![plot](plot.png)",
                "",
                "| variant | what it is |",
                "|---|---|",
                *(f"| {label} | `{spec}` |" for label, spec in ablation.variants.items()),
            ]
        )
        + "\n"
    )


def draw(panels: Sequence[Curve | Bars], data: Sequence[dict[str, dict]], path: Path) -> None:
    """All panels side by side, three a row; lines and bars are means,
    bands and whiskers span the seeds.
    """
    plt = pyplot()
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.8 * columns, 3.8 * rows), constrained_layout=True, squeeze=False
    )
    for axis, panel, entries in zip(axes.ravel(), panels, data):
        axis.set_title(panel.title, fontsize=10)
        for i, (label, entry) in enumerate(entries.items()):
            if isinstance(panel, Curve):
                # Ten colours, then again with another line.
                axis.plot(
                    entry["x"],
                    entry["mean"],
                    label=label,
                    color=f"C{i % 10}",
                    ls="-" if i < 10 else "--",
                    marker="o" if len(entry["x"]) < 8 else "",
                    ms=3,
                )
                axis.fill_between(
                    entry["x"], entry["min"], entry["max"], color=f"C{i % 10}", alpha=0.12, lw=0
                )
            elif entry["mean"] is not None:
                axis.bar(i, entry["mean"], color=f"C{i % 10}")
                axis.plot([i, i], [entry["min"], entry["max"]], color="0.2", lw=1)
        if isinstance(panel, Bars):
            axis.set_xticks(range(len(entries)), list(entries), rotation=45, ha="right", fontsize=7)
        else:
            axis.set_xlabel(panel.x)
            if panel.log_x:
                axis.set_xscale("log", base=2)
    for axis in axes.ravel()[len(panels) :]:
        axis.set_visible(False)
    if lines := next(
        (axis for axis, panel in zip(axes.ravel(), panels) if isinstance(panel, Curve)), None
    ):
        figure.legend(
            *lines.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8
        )
    figure.savefig(path)
    plt.close(figure)


def run(
    ablation: Ablation,
    seeds: Sequence[int],
    workdir: Path,
    command: str,
    steps: int = 0,
    smoke: bool = False,
) -> list[Path]:
    """Train what is missing in `workdir`, and write table.md, table.json and plot.png there.

    Returns these three paths.

    Args:
      steps: of a run (0: those of the ablation). smoke: `shrink` every run.

    Raises:
      ValueError: a variant cannot be, named before anything runs.
    """

    def prepare(config: Config) -> None:
        if smoke:
            shrink(config)
        make_files(config, workdir / "files", ablation.rate_samples)

    variants = {Variant(spec): label for label, spec in ablation.variants.items()}
    done = run_all(lambda: ablation.config(steps), list(variants), seeds, workdir, prepare=prepare)
    grouped = {variants[variant]: runs for variant, runs in group_runs(done).items()}
    rows = [table_rows(table, grouped) for table in ablation.tables]
    data = [panel_data(panel, grouped) for panel in ablation.panels]
    told = [run.summary for run in done]
    machine = (
        f"{max(s['finished'] for s in told)[:10]}, "
        f"{', '.join(sorted({s['device'] for s in told}))}, {os.cpu_count()} processors, JAX "
        f"{', '.join(sorted({s['jax'] for s in told}))}; seeds {', '.join(map(str, seeds))}; "
        f"{max(s['steps'] for s in told)} steps."
    ) + " **A smoke run: the numbers mean nothing.**" * smoke
    text, numbers, plot = workdir / "table.md", workdir / "table.json", workdir / "plot.png"
    text.write_text(markdown(ablation, rows, command, machine))
    numbers.write_text(
        json.dumps(
            {
                "ablation": ablation.name,
                "source": ablation.source,
                "command": command,
                "machine": machine,
                "variants": dict(ablation.variants),
                "tables": {t.title: r for t, r in zip(ablation.tables, rows)},
                "panels": {
                    p.title + (f" over {p.x}" if isinstance(p, Curve) else ""): d
                    for p, d in zip(ablation.panels, data)
                },
            }
        )
        + "\n"
    )
    draw(ablation.panels, data, plot)
    return [text, numbers, plot]
