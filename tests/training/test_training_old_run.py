"""A run that the code of commit 968f100 made goes on with today's: its checkpoint,
its host state, the numbers of its next step.

runs/968f100.tar.gz is its workdir after two steps, with a model of one layer: RPO under SPEED's
screening, a call under way, so that prompts in flight, pending samples, buffer, replay cache and
stream are all in the checkpoint. It was made there by

    python experiments/train.py --config=configs/embedded_rpo_speed_rloo.py --workdir=run \
        --config.model.path=model --config.rule.low=-1 --config.rule.high=2 --config.rule.n=4 \
        --config.rule.n_init=2 --config.driver.groups=4 --config.driver.screen_prompts=8 \
        --config.driver.buffer_groups=24 --config.driver.depth=1 --config.sampler.slots=8 \
        --config.sampler.prefill_chunk=4 --config.data.train_prompts=32 \
        --config.data.eval_prompts=8 --config.training.micro_batch=0 \
        --config.training.length_multiple=0 --config.evaluation.every=2 \
        --config.evaluation.samples=1 --config.training.steps=2 --config.logging.export=false \
        --config.logging.tensorboard=false --config.logging.progress=false
"""

import pathlib
import tarfile

import pytest

from rl_speed.config import Config
from rl_speed.runtime.metrics import read_lines
from rl_speed.runtime.workdir import read_settings
from rl_speed.training.loop import Trainer

pytestmark = pytest.mark.usefixtures("quick_compiles")
ARCHIVE = pathlib.Path(__file__).parent / "runs" / "968f100.tar.gz"
# Of the third step, as that code itself wrote it, with the same command and
# --config.training.steps=3.
NEXT = {
    "step": 2,
    "train/groups": 4,
    "rollout/generated_tokens": 121,
    "rollout/generated_samples": 16,
    "rollout/decode_steps": 19,
    "train/length": 14.125,
    "train/prefix": 4.75,
    "train/age_mean": 1.5,
    "train/age_max": 2,
    "rollout/accepted": 4,
    "total/tokens": 858,
    "total/samples": 96,
    "tally/screened": 24,
    "tally/completed": 12,
    "rollout/pending_calls": 1,
    # 412 there: it settled ties between equal rewards by log-prob, and today a lot does.
    "replay/tokens": 422,
    "replay/age_mean": 1.90625,
    "prompts/visits": 24,
    "train/tokens": 150,
}

# What the update costs and does not change.
GONE = ("training.micro_batch", "training.length_multiple")


def settings(path):
    """Its config.json as a Config of today; fields that came since have their defaults,
    those that went are left out.
    """
    config = Config()
    for section, values in read_settings(path, "").items():
        if not isinstance(values, dict):
            setattr(config, section, values)
            continue
        for name, value in values.items():
            if f"{section}.{name}" in GONE:
                continue
            assert hasattr(getattr(config, section), name), f"config.{section}.{name} is gone"
            setattr(getattr(config, section), name, value)
    return config


def test_its_third_step_is_the_one_that_it_would_have_made(tmp_path, monkeypatch):
    with tarfile.open(ARCHIVE) as archive:
        # Python 3.11.2, which is Debian's, knows no filters.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = settings(tmp_path / "run" / "config.json")
    config.training.steps, config.checkpoints.resume, config.logging.progress = 3, "must", False
    before = read_lines(tmp_path / "run" / "metrics.jsonl")
    trainer = Trainer(config, "run")
    assert trainer.step == 2 and len(trainer.rl_step.driver._pending) == 1
    trainer.run()
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert lines[:2] == before and len(lines) == 3
    assert {name: lines[2][name] for name in NEXT} == NEXT
