"""Measured pass rates: of held-out or of training prompts,
the latter as a table that curation takes.
"""

import dataclasses
import json

import numpy as np
import pytest

from lab.comparison import pass_rates
from rl_speed.config.presets import embedded, tiny
from rl_speed.data.pass_rates import PassRates
from rl_speed.policy import load_tokenizer
from rl_speed.training import build
from rl_speed.training.stream import curate


def small():
    return tiny(embedded("speed_rloo"), train_prompts=20)


def test_the_table_of_training_prompts(tmp_path):
    config = small()
    # A schedule that needs the very table which is to be made.
    config.data.order = "schedule"
    config.data.pass_rates = str(tmp_path / "pass_rates.json")
    config.data.keep_low = 0.1
    measured = pass_rates.measure(config, 8, "train")
    result = measured.evaluation
    ids = measured.ids
    stream, _ = build.build_data(small(), load_tokenizer(build.policy_directory(config)))
    assert ids == [p.id for p in stream.prompts]
    reference = PassRates(np.array([0.0, 1.0]), "coins")
    pass_rates.save(measured, tmp_path, "command", reference)
    kept, table = curate(stream.prompts, str(tmp_path / "pass_rates.json"), 0.1, 1.0)
    assert [table[i] for i in ids] == pytest.approx(result.correct / 8)
    assert [p.id for p in kept] == [i for i, k in zip(ids, result.correct) if k >= 1] and 0 < len(
        kept
    ) < 20
    others = [dataclasses.replace(p, text=f"{p.text} Why?") for p in stream.prompts]
    with pytest.raises(ValueError, match="was made of other questions: 20 of 20 prompts have"):
        curate(others, str(tmp_path / "pass_rates.json"), 0.1, 1.0)
    saved = json.loads((tmp_path / "pass_rates.json").read_text())
    assert (
        saved["ids"] == ids
        and saved["prompts"] == 20
        and len(saved["rates"]) == len(saved["classes"]) == 20
    )
    # The first and the last of twenty bins; all else the reference lacks.
    rates = np.array(saved["rates"])
    ends = np.mean(rates < 0.05), np.mean(rates >= 0.95)
    alike = min(ends[0], 0.5) + min(ends[1], 0.5)
    assert saved["reference"] == "coins"
    assert saved["total_variation"] == pytest.approx(1 - alike, abs=1e-4)


def test_what_came_into_reach(tmp_path):
    start = pass_rates.measure(small(), 2)
    right = dataclasses.replace(start.evaluation, correct=np.full_like(start.evaluation.correct, 2))
    better = start._replace(evaluation=right)
    plot = pass_rates.save_frontier(start, {"trained": better}, tmp_path)
    saved = json.loads((tmp_path / "frontier.json").read_text())
    assert plot.stat().st_size > 10_000 and saved["ids"] == start.ids
    assert set(saved["rates"]["trained"]) == {1.0} != set(saved["rates"]["start"])
    with pytest.raises(ValueError, match="other was not measured on the prompts of the start"):
        other = start._replace(questions=dict(reversed(start.questions.items())))
        pass_rates.save_frontier(start, {"other": other}, tmp_path)


def test_a_preset_whose_rule_needs_a_forecast_is_measured(tmp_path):
    config = tiny(embedded("forecast_rloo"), train_prompts=20, eval_prompts=8)
    config.logging.progress = False
    measured = pass_rates.measure(config, 2)
    assert len(measured.ids) == 8 and measured.evaluation.samples == 2
    pass_rates.save(measured, tmp_path, "")
    path = tmp_path / "pass_rates.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rates": [2.5] * 8}))
    with pytest.raises(ValueError, match="pass_rates.json is damaged: rates must be between 0 an"):
        pass_rates.load(tmp_path)


def test_total_variation():
    a = np.array([0.01, 0.02, 0.5, 0.99])
    assert pass_rates.total_variation(a, a) == 0 and pass_rates.total_variation(a, a[:1]) == 0.5
    assert pass_rates.total_variation(a[:1], a[3:]) == 1


def test_labels_of_later_policies_are_all_different(launch, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    script = ("experiments/pass_rates.py", "--config=configs/embedded.py", f"--out={tmp_path}/out")
    cases = {
        f"start={tmp_path}": "--later: 'start' is the label of the policy of --config",
        f"a={tmp_path},a={tmp_path}": f"--later names 'a' twice: {tmp_path} and {tmp_path}",
        f"={tmp_path}": f"--later: '={tmp_path}' has an empty label",
        "a=nowhere": "--later is LABEL=DIRECTORY of a policy; got 'a=nowhere'",
    }
    commands = [(*script, f"--later={later}") for later in cases]
    done = launch.together(commands, [{}] * len(commands))
    for one, message in zip(done, cases.values(), strict=True):
        assert (one.returncode, one.stderr.splitlines()[-1]) == (2, f"error: {message}")


def test_what_cannot_be_measured():
    config = small()
    config.data.train_prompts = 0
    with pytest.raises(
        ValueError, match="config.data.train_prompts=0 makes the training prompts endless"
    ):
        pass_rates.measure(config, 2, "train")
    with pytest.raises(ValueError, match="split must be one of eval, train; got 'test'"):
        pass_rates.measure(config, 2, "test")
