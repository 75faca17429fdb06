"""Memory against plain screening: ratios on runs whose numbers are known,
predictions against closed forms.
"""

import json

import numpy as np
import pytest

from rl_speed.sampling import Speed
from rl_speed.studies.comparison import orders
from rl_speed.studies.comparison.runs import Run, Variant
from rl_speed.studies.simulation import Memory

RULE = Speed(4, 8)


def run(spec, seed, tokens, unseen=0.0):
    """Accuracy rises by 0.1 a step, which costs `tokens`, and half as many samples."""
    evaluations = [{"step": i, "tokens": tokens * i, "eval/accuracy": 0.1 * i} for i in range(5)]
    records = [
        {
            "total/tokens": tokens * i,
            "total/samples": tokens * i / 2,
            "prompts/unseen_max": unseen * i,
            "rollout/accepted": i,
            "rollout/screened": 4 * i,
            "train/sequences": 2,
            "prompts/epoch": tokens * i / 10,
        }
        for i in range(1, 5)
    ]
    return Run(Variant(spec), seed, {"evaluations": evaluations}, records)


def test_ratios_are_of_runs_of_the_same_seed():
    plain, memory = [run("a", 0, 10), run("a", 1, 30)], [run("b", 0, 5, 0.5), run("b", 1, 10, 0.25)]
    near, far = orders.to_targets(
        plain, memory, [0.25, 0.9], np.array([2, 3]), np.array([1.4, 1.6])
    )
    assert near["plain"] == pytest.approx([25, 75]) and near["ratios"] == pytest.approx([2, 3])
    assert (
        near["simulated"] == pytest.approx(1.5)
        and near["other_steps"] == pytest.approx([2.5, 2.5])
        and far["simulated"] is None
    )
    assert far["plain"] == [None, None] and far["ratios"] == []
    assert orders.at_steps(plain, memory, [1, 4], "tokens") == [[2, 3], [2, 3]]
    assert orders.at_steps(plain, [run("b", 0, 40), run("b", 1, 40)], [2], "samples") == [
        [0.25, 0.75]
    ]
    assert orders.longest_unseen(memory) == 2.0
    found = orders.screened(plain, 4, 2)
    assert found == pytest.approx(
        {"epochs": (4 + 12) / 2, "accepted": 0.25, "most": (20 / 8 + 60 / 8) / 2}
    )
    ends = orders.at_the_end({"a": plain, "b": memory})
    assert (
        ends["a"]["tokens"] == [40, 120]
        and ends["b"]["tokens"] == [20, 40]
        and ends["a"]["budget"] == 20
    )
    assert ends["a"]["at_tokens"] == pytest.approx([0.2, 0.2 / 3]) and ends["b"][
        "at_tokens"
    ] == pytest.approx([0.4, 0.2])
    case = {
        "method": "b",
        "unseen": 2.0,
        "bound": 4.0,
        "targets": [near, far],
        "steps": [
            {
                "step": 4,
                "plain": found,
                "memory": found,
                "samples": (ratio := {"measured": [2.0, 3.0], "simulated": 2.0}),
                "tokens": ratio,
            }
        ],
    }
    text = orders.memory_markdown([case], ends, "command", "made")
    assert "| 0.25 | 0 (0 to 0) | 0 (0 to 0) | 2.50 (2.00 to 3.00) | 1.50 | 2 / 2 |" in text
    assert "| 0.9 | not by every seed |" in text
    assert (
        "| 4 | 2.50 (2.00 to 3.00) | 2.00 | 2.50 (2.00 to 3.00) | 2.00 | 0.80 | 5.00 | 8.00 / "
        "8.00 | 0.250 / 0.250 |"
    ) in text


def test_predictions_of_the_shuffle_are_the_closed_form():
    """Half the prompts are hopeless and long; the others change from 0.5 to 0.9.

    Acceptance is linear between measurements only in the pass rate, so it is taken at the middle of
    every stretch.
    """
    size, every = 200, 10
    rates = np.repeat([[0.5, 0.9], [0.0, 0.0]], size // 2, axis=0)
    lengths = np.repeat([[2.0, 4.0], [10.0, 10.0]], size // 2, axis=0)
    found = orders.predict(np.array([0, 20]), rates, lengths, RULE, 60, [Memory()], every, range(3))
    p, tokens = np.array([0.6, 0.8]), np.array([2.5, 3.5])
    accepted = (1 - p**4 - (1 - p) ** 4) / 2
    groups = 60 * every
    np.testing.assert_allclose(
        found["shuffle"]["samples"], np.cumsum(groups * (4 / accepted + 8)), rtol=0.04
    )
    expected = np.cumsum(groups * (4 / accepted * (tokens + 10) / 2 + 8 * tokens))
    np.testing.assert_allclose(found["shuffle"]["tokens"], expected, rtol=0.04)
    assert found["steps"].tolist() == [10, 20]
    gain = {x: found["shuffle"][x][-1] / found["memory"][0][x][-1] for x in ("samples", "tokens")}
    # What is hopeless costs five times as much.
    assert gain["samples"] > 1.1 and gain["tokens"] > 1.1 * gain["samples"]


def test_curves_must_be_of_the_same_prompts(tmp_path):
    def write(step, **content):
        folder = tmp_path / f"step{step}"
        folder.mkdir()
        (folder / "pass_rates.json").write_text(json.dumps(content))
        return folder

    good = {
        20: write(20, ids=["a", "b"], rates=[0.5, 1], lengths=[3, 4]),
        0: write(0, ids=["a", "b"], rates=[0, 1], lengths=[1, 2]),
    }
    steps, rates, lengths = orders.load_curves(good)
    assert (
        steps.tolist() == [0, 20]
        and rates.tolist() == [[0, 0.5], [1, 1]]
        and lengths.tolist() == [[1, 3], [2, 4]]
    )
    with pytest.raises(ValueError, match="step40/pass_rates.json is of other prompts"):
        orders.load_curves({**good, 40: write(40, ids=["b", "a"], rates=[0, 1], lengths=[1, 2])})
    with pytest.raises(ValueError, match="step60/pass_rates.json has no lengths"):
        orders.load_curves({**good, 60: write(60, ids=["a", "b"], rates=[0, 1])})


def test_the_command(launch, tmp_path):
    runs, curves, out = tmp_path / "runs", tmp_path / "curves", tmp_path / "out"
    for spec, tokens in (("speed_rloo", 10), ("speed_rloo@data.order=memory", 5)):
        made = run(spec, 0, tokens, 0.5)
        folder = runs / made.variant.folder / "seed0"
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(made.summary))
        (folder / "config.json").write_text("{}")
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps({"step": i, **r}) + "\n" for i, r in enumerate(made.records * 5))
        )
    command = lambda: launch(
        "experiments/memory.py",
        f"--runs={runs}",
        f"--curves={curves}",
        f"--out={out}",
        "--seeds=0",
        "--every=10",
        "--targets=0.25",
    )
    failed = command()
    assert (
        failed.returncode == 2
        and "has no folders step0" in failed.stderr
        and "Traceback" not in failed.stderr
    )
    for step, rate in ((0, 0.4), (20, 0.6)):
        (curves / f"step{step}").mkdir(parents=True)
        (curves / f"step{step}" / "pass_rates.json").write_text(
            json.dumps(
                {
                    "ids": [f"p{i}" for i in range(300)],
                    "rates": [rate, 0.0, 1.0] * 100,
                    "lengths": [2.0, 9.0, 2.0] * 100,
                }
            )
        )
    done = command()
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"table.md", "table.json", "memory.png"}
    (case,) = json.loads((out / "table.json").read_text())["cases"]
    assert [row["step"] for row in case["steps"]] == [10, 20] and case["targets"][0]["ratios"] == [
        2.0
    ]
    assert case["steps"][1]["tokens"]["simulated"] > case["steps"][0]["tokens"]["simulated"] > 1.0
