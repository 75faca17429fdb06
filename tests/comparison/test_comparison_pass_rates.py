"""Measured pass rates: of held-out or of training prompts,
the latter as a table that curation takes.
"""

import json

import pytest

from rl_speed.config.presets import embedded, tiny
from rl_speed.policy import load_tokenizer
from rl_speed.studies.comparison import pass_rates
from rl_speed.training import build
from rl_speed.training.stream import curate


def small():
    return tiny(embedded("speed_rloo"), train_prompts=20)


def test_the_table_of_training_prompts(tmp_path):
    config = small()
    # A schedule that needs the very table which is to be made.
    config.data.order, config.data.pass_rates, config.data.keep_low = (
        "schedule",
        str(tmp_path / "pass_rates.json"),
        0.1,
    )
    measured = pass_rates.measure(config, 8, "train")
    result, ids, _ = measured
    stream, _ = build.build_data(small(), load_tokenizer(build.policy_directory(config)))
    assert ids == [p.id for p in stream.prompts]
    pass_rates.save(measured, tmp_path, "command")
    kept, table = curate(stream.prompts, str(tmp_path / "pass_rates.json"), 0.1, 1.0)
    assert [table[i] for i in ids] == pytest.approx(result.correct / 8)
    assert [p.id for p in kept] == [i for i, k in zip(ids, result.correct) if k >= 1] and 0 < len(
        kept
    ) < 20
    saved = json.loads((tmp_path / "pass_rates.json").read_text())
    assert (
        saved["ids"] == ids
        and saved["prompts"] == 20
        and len(saved["rates"]) == len(saved["classes"]) == 20
    )


def test_what_cannot_be_measured():
    config = small()
    config.data.train_prompts = 0
    with pytest.raises(
        ValueError,
        match="config.data.train_prompts=0 makes the chain task's training prompts endless",
    ):
        pass_rates.measure(config, 2, "train")
    with pytest.raises(ValueError, match="split must be one of eval, train; got 'test'"):
        pass_rates.measure(config, 2, "test")
