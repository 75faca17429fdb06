"""rl_speed/objectives/README.md, "How to add", followed literally:
the modules are taken from there, and trained with.
"""

import re
import shlex
import sys

import numpy as np
import pytest
from killable import small_config

from rl_speed.config import methods
from rl_speed.config.command import check_overrides
from rl_speed.objectives import check_advantage
from rl_speed.runtime.metrics import read_lines
from rl_speed.training.loop import Trainer

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture()
def own(repo, tmp_path, monkeypatch):
    """{what a command there trains with: its settings of the objective};
    the modules lie in the working directory.
    """
    text = (repo / "rl_speed/objectives/README.md").read_text(encoding="utf-8")
    for name, block in re.findall(r"`(my_\w+\.py)`.*?```python\n(.*?)```", text, re.S):
        (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    found = {}
    for command in re.findall(
        r"    (python experiments/train.py .*?)(?=\n    python|\n\n)", text, re.S
    ):
        words = shlex.split(command.replace("\\\n", " "))
        assert check_overrides(words) == []
        settings = dict(
            word.removeprefix("--config.objective.").split("=", 1)
            for word in words
            if ".objective." in word
        )
        found[settings.get("loss", settings.get("advantage"))] = settings
    return found


def train(tmp_path, method, settings):
    """Three steps of two updates each, the second one on samples of the policy before:
    lines of metrics.jsonl, but for the clock.
    """
    config = methods.apply(small_config(3), method)
    config.training.minibatches = 2
    config.evaluation.every = 0
    config.logging.rollouts = 0
    config.optimizer.learning_rate = 2e-2  # so that ratios leave their bounds
    for name, value in settings.items():
        kind = type(getattr(config.objective, name))
        setattr(config.objective, name, kind(value))
    folder = tmp_path / f"{method} {len(settings)}"
    Trainer(config, folder).run()
    return [
        {
            k: v
            for k, v in line.items()
            if not k.startswith(("time/", "process/")) and not k.endswith("train_s")
        }
        for line in read_lines(folder / "metrics.jsonl")
    ]


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_own_losses_train_as_those_that_were_kept(own, tmp_path, name):
    shipped = train(tmp_path, name, {})
    mine = train(tmp_path, name, own[f"my_losses:{name}"])
    assert mine == shipped
    assert any(line["train/clip_low"] + line["train/clip_high"] > 0 for line in shipped) and any(
        line["train/grad_norm"] > 0 for line in shipped
    )


def test_own_advantage_trains(own, tmp_path):
    lines = train(tmp_path, "speed_rloo", own["my_advantages:rare"])
    assert len(lines) == 3 and all(
        line["train/grad_norm"] > 0 and line["train/skipped"] == 0 for line in lines
    )
    import my_advantages

    rewards = np.array([1, 0, 0, 1, 1, 0, 7], np.float32)
    ids = np.array([0, 0, 0, 1, 1, 2, -1])
    check_advantage(my_advantages.rare)
    np.testing.assert_allclose(
        my_advantages.rare(rewards, ids, 4, ids), [2, -1, -1, 0, 0, 0, 0], rtol=1e-6
    )


@pytest.mark.parametrize(
    "field, value, message",
    [
        (
            "loss",
            "gspoo",
            "config.objective.loss must be one of pg, ppo, .*, or a function of yours",
        ),
        (
            "loss",
            "my_losses:gsp",
            (
                "config.objective.loss='my_losses:gsp': the function 'my_losses:gsp' "
                "cannot be used: .*'gsp'"
            ),
        ),
        (
            "loss",
            "no_such_losses:gspo",
            "cannot be used: ModuleNotFoundError: No module named 'no_such_losses'",
        ),
        (
            "loss",
            "broken_losses:gspo",
            (
                "config.objective.loss='broken_losses:gspo': the function .* cannot be used: "
                "NameError: .*'jnp'"
            ),
        ),
        (
            "loss_settings",
            "lowest=1",
            "'my_losses:cispo' takes no number 'lowest' that is set here; it takes highest",
        ),
        ("loss_settings", "highest", "'highest' does not read name=number"),
        ("loss_settings", "clip_low=1", "it takes highest; config.objective.clip_low is a field"),
        ("clip_low", -0.1, "config.objective.loss='ppo': clip_low must not be negative, got -0.1"),
        (
            "advantage",
            "my_losses:cispo",
            r"config.objective.advantage='my_losses:cispo': called with .* it raised TypeError",
        ),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_built(own, tmp_path, field, value, message):
    (tmp_path / "broken_losses.py").write_text("jnp.zeros(1)\n")
    config = methods.apply(small_config(1), "grpo")
    if field == "loss_settings":
        config.objective.loss = "my_losses:cispo"
    setattr(config.objective, field, value)
    with pytest.raises(ValueError, match=message):
        config.validate()
