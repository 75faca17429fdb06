"""Every script of experiments/ablations: its variants can be,
and a tiny run of it gives a whole table and a picture.

A method is trained once for all scripts; variants that differ from it in numbers alone are given
that finished run.
"""

import dataclasses
import importlib
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from rl_speed.studies.comparison import ablation, measures
from rl_speed.studies.comparison.runs import Run, Variant

pytestmark = pytest.mark.usefixtures("quick_compiles")
FOLDER = Path(__file__).parents[2] / "experiments" / "ablations"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if not path.stem.startswith("_"))


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture(scope="module")
def trained():
    """(method, files it is given) -> folder of a finished run, filled as scripts are tested."""
    return {}


def kind(spec):
    return (
        spec.split("@")[0],
        "pass_rates=measured" in spec,
        "order=" in spec,
        "cache=measured" in spec,
        "alpha=1" in spec,
    )


# One in every run of the tests, whose runs start from a cache made before, the others
# with `-m slow`.
USUAL = ("rpo_eps",)


@pytest.mark.parametrize(
    "name", [pytest.param(s, marks=[pytest.mark.slow] * (s not in USUAL)) for s in SCRIPTS]
)
def test_script_gives_a_row_of_numbers_for_every_variant(name, load, trained, tmp_path):
    script = load(name)
    ours, folder = script.ABLATION, lambda spec: tmp_path / Variant(spec).folder / "seed0"
    assert (
        ours.name == name
        and f"experiments/ablations/{name}.py" in script.__doc__
        and "minutes" in script.__doc__
    )
    new = {}
    for spec in ours.variants.values():
        if kind(spec) in trained:
            shutil.copytree(
                trained[kind(spec)], folder(spec), ignore=shutil.ignore_patterns("checkpoints")
            )
        elif kind(spec) not in new:
            new[kind(spec)] = spec
    # First what trains, then what is given its run.
    first = dataclasses.replace(ours, variants={spec: spec for spec in new.values()})
    if new:
        ablation.run(first, [0], tmp_path, "first", smoke=True)
        trained |= {key: folder(spec) for key, spec in new.items()}
    for spec in ours.variants.values():
        if not folder(spec).exists():
            shutil.copytree(
                trained[kind(spec)], folder(spec), ignore=shutil.ignore_patterns("checkpoints")
            )
    text, numbers, plot = ablation.run(ours, [0], tmp_path, "the command", smoke=True)
    found = json.loads(numbers.read_text())
    assert (
        plot.stat().st_size > 5000
        and "`the command`" in text.read_text()
        and "2 steps" in found["machine"]
    )
    for table in ours.tables:
        rows = found["tables"][table.title]
        assert [row["variant"] for row in rows] == list(ours.variants)
        for row in rows:
            for column in table.columns:
                (value,) = row[column.title]["values"]
                # A tiny run reaches no target, and draws no more than four samples a prompt.
                if not (
                    value is None
                    and re.match(r"steps$|training \(s\)$|tokens \(th|pass@(16|32)$", column.title)
                ):
                    assert math.isfinite(value), (row["variant"], column.title)
    assert len(ours.panels) == len(found["panels"])
    for drawn in found["panels"].values():
        assert list(drawn) == list(ours.variants)
        for entry in drawn.values():
            assert np.isfinite(entry["mean"]).all() and np.size(entry["mean"]) > 0


def test_every_script_is_in_the_list_with_its_results_or_not_run():
    rows = dict(
        re.findall(
            r"^\| \[(\w+)\.py\]\(\1\.py\) \|.*\| (.*) \|$", (FOLDER / "README.md").read_text(), re.M
        )
    )
    assert sorted(rows) == SCRIPTS
    for name, status in rows.items():
        if status != "not run":
            (path,) = re.findall(r"\((.*?)\)", status)
            assert (FOLDER / path).is_file(), name


def test_variants_are_all_different(load):
    for name in SCRIPTS:
        specs = list(load(name).ABLATION.variants.values())
        assert len(set(specs)) == len(specs)


def fake(seed, accuracy, seconds=1.0, spec="rloo"):
    evaluations = [
        {
            "step": i,
            "samples": 10 * i,
            "train_s": seconds * i,
            "eval/accuracy": a,
            "eval/pass_at_2": a + 0.1,
        }
        for i, a in enumerate(accuracy)
    ]
    records = [
        {
            "step": i,
            "time/step": 2.0 + i,
            "time/compile": 1.0,
            "generated_tokens": 30.0 * (i + 1),
            "generated_samples": 10.0,
            "entropy": float(i),
            "pass_rates": [3] + [0] * 10 + [1],
        }
        for i in range(len(accuracy) - 1)
    ]
    return Run(
        Variant(spec),
        seed,
        {"evaluations": evaluations, "steps": len(records), "samples": 50},
        records,
    )


def test_measures_of_a_run_whose_numbers_are_known():
    run = fake(0, [0.2, 0.3, 0.4, 0.5, 0.6])
    assert measures.final()(run) == 0.6 and measures.final("eval/accuracy_long")(run) is None
    assert (
        measures.reaches(0.45, "samples")(run) == pytest.approx(25)
        and measures.reaches(0.7, "step")(run) is None
    )
    # Steps 0 to 2 compile: step 3 alone is left.
    assert (
        measures.step_seconds(run) == 4.0 and measures.per_step("generated_tokens", 10)(run) == 12.0
    )
    assert (
        measures.ratio("generated_tokens", "generated_samples")(run) == 12.0
        and measures.last_steps("entropy", 0.5)(run) == 2.5
    )
    assert measures.pass_at(2)(run) == pytest.approx(0.7) and measures.pass_at(2, 0.5)(
        run
    ) == pytest.approx(0.5)
    assert measures.pass_at(4)(run) is None and measures.pass_at(1, 0.01)(run) == 0.3
    assert [list(v) for v in measures.pass_at_curve(0.5, "").points(run)] == [[1, 2], [0.4, 0.5]]
    assert (
        measures.pass_rate_share(0)(run.records[0]) == 0.75
        and measures.pass_rate_share(-1)(run.records[0]) == 0.25
    )
    x, y = measures.training("entropy", "").points(run)
    assert x.tolist() == [0, 1, 2, 3] and y.tolist() == [0, 0.5, 1, 1.5]
    x, y = measures.held_out("samples", "eval/pass_at_2").points(run)
    assert x.tolist() == [0, 10, 20, 30, 40] and y[0] == pytest.approx(0.3)


def test_seeds_are_summed_up_by_mean_smallest_and_largest():
    runs = {
        "a": [fake(0, [0.2, 0.4], 1.0), fake(1, [0.4, 0.8], 3.0)],
        "b": [fake(0, [0.2, 0.3]), fake(1, [0.2, 0.5])],
    }
    table = ablation.Table(
        "t", (measures.ACCURACY, measures.Column("to 0.4", measures.reaches(0.4, "train_s"), 1))
    )
    a, b = ablation.table_rows(table, runs)
    assert (
        ablation.cell(a["final accuracy"], 2) == "0.60 (0.40 to 0.80)"
        and ablation.cell(b["to 0.4"], 1) == "1 of 2 seeds"
    )
    assert ablation.cell(ablation.summarise([1234.5]), 0) == "1,234"
    curve = ablation.panel_data(measures.held_out("train_s"), runs)["a"]
    assert curve == {"x": [0, 2], "mean": [0.3, 0.6], "min": [0.2, 0.4], "max": [0.4, 0.8]}


def test_settings_are_checked_by_name():
    wrong = ablation.Ablation("x", "", "", {}, (), (), settings={"rule.m_init": 3})
    with pytest.raises(ValueError, match="config.rule.m_init"):
        wrong.config()
