"""rl_speed/rewards/README.md, "How to add: a reward", followed literally:
the module is taken from there, and trained with.
"""

import re
import shlex

import numpy as np
import pytest
from killable import small_config

from rl_speed.config import Config
from rl_speed.config.command import check_overrides
from rl_speed.data.prompts import Prompt
from rl_speed.rewards import FunctionRewards
from rl_speed.rewards.scorer import TextJudge
from rl_speed.runtime.metrics import read_lines
from rl_speed.sampling import HostVerify
from rl_speed.studies.inspection import write_report
from rl_speed.training import build
from rl_speed.training.loop import Trainer

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture()
def own(repo, tmp_path, monkeypatch):
    """The two settings that the command line there gives;
    the module lies in the working directory.
    """
    text = (repo / "rl_speed/rewards/README.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## How to add: a reward\n(.*)", text, re.S)
    (block,) = re.findall(r"```python\n(.*?)```", section, re.S)
    (command,) = re.findall(r"    (python experiments/train.py .*?)\n\n", section, re.S)
    words = shlex.split(command.replace("\\\n", " "))
    assert check_overrides(words) == []
    (tmp_path / "my_rewards.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    return {
        name: word.partition("=")[2]
        for name in ("verifier", "extra")
        for word in words
        if word.startswith(f"--config.reward.{name}=")
    }


def test_own_rewards_train(own, tmp_path):
    config = small_config(steps=2)
    config.reward.verifier, config.reward.extra = own["verifier"], own["extra"]
    config.reward.accuracy_weight, config.evaluation.every, config.logging.rollouts = 2.0, 0, 4
    trainer = Trainer(config, tmp_path / "run")
    summary = trainer.run()
    records, samples = (
        read_lines(tmp_path / "run" / "metrics.jsonl"),
        read_lines(tmp_path / "run" / "rollouts.jsonl"),
    )
    assert len(samples) == 8 and {s["correct"] for s in samples} == {True, False}
    for s in samples:  # the sum that is trained on, sample by sample
        assert s["correct"] == (s["response"].strip() == s["answer"])
        assert s["reward"] == pytest.approx(
            2 * s["correct"] + 0.2 * (0 if s["truncated"] else 1 / s["length"]), rel=1e-6
        )
    for record in records:
        assert (
            0 < record["reward/accuracy"] < 1
            and 0 < record["reward/brevity"] < 1
            and record["train/skipped"] == 0
        )
    # Every sample of the run was scored once by each.
    scored = summary["samples"]
    assert summary["verifier"]["verifier/ok"] == summary["verifier"]["extra/ok"] == scored
    text = write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert "Parts of the reward" in text and "brevity" in text
    # Counts go on over a resumed run, those of verifier and extra apart.
    config.training.steps = 3
    again = Trainer(config, tmp_path / "run")
    again.scorer.load_state_dict({"timeout": 5, "extra rewards": {"timeout": 7}})
    found = again.scorer.metrics()
    again._close()
    assert (
        found["verifier/ok"],
        found["extra/ok"],
        found["verifier/timeout"],
        found["extra/timeout"],
    ) == (scored, scored, 5, 7)


class Characters:
    def decode(self, ids):
        return "".join(map(chr, ids))


def test_own_verifier_as_the_compiled_loop_calls_it(own):
    """What a prompt is known by goes there as bytes, and comes back the same;
    the scorer on the host says the same.
    """
    meta = lambda i: {"nums": [i, 2.5], "√": None}
    prompts = [
        Prompt(
            f"p{i}", np.zeros(1, np.int32), answer, np.zeros(0, np.int32), "wie groß?", meta=meta(i)
        )
        for i, answer in enumerate(["42", "√2", "42"])
    ]
    tokens = np.array([[ord(c) for c in text] for text in ("42.", "√2.", "41.")], np.int32)
    lengths = np.array([3, 3, 3], np.int32)
    with FunctionRewards([own["verifier"]], 1) as function:
        judge = TextJudge(Characters(), (ord("."),), function)
        rows = judge.encode(prompts, 256)
        assert judge(tokens, lengths, rows).tolist() == [1, 1, 0]
        # Cut off, and still right.
        assert judge(tokens, np.array([2, 2, 3], np.int32), rows).tolist() == [1, 1, 0]
    seen = []

    class Spy:
        fields = FunctionRewards.fields

        def judge(self, samples):
            seen.extend(samples)
            return np.zeros(len(samples), np.float32), ["ok"] * len(samples)

    TextJudge(Characters(), (ord("."),), Spy())(tokens, np.array([2, 3, 3], np.int32), rows)
    assert seen[0] == {
        "response": "42",
        "answer": "42",
        "question": "wie groß?",
        "meta": meta(0),
        "length": 2,
        "ended": False,
    }
    assert seen[1]["ended"] and seen[1]["response"] == "√2" and seen[2]["meta"] == meta(2)
    with pytest.raises(ValueError, match="prompt 'p1': what its verifier needs to know takes"):
        judge.encode(prompts[1:], 20)
    with pytest.raises(
        ValueError,
        match="prompt 'odd': what the data has beside question and answer cannot be taken",
    ):
        judge.text(
            Prompt("odd", np.zeros(1, np.int32), "1", np.zeros(0, np.int32), "", meta={"x": {1, 2}})
        )


def test_own_verifier_is_called_back_in_the_loop(own):
    config = small_config(steps=1)
    config.driver.where, config.reward.verifier = "in_loop", own["verifier"]
    config.driver.prefetch = False
    config.validate()
    policy = build.Policy("", None, None, Characters(), (0,), None)
    verify, encode = build.in_loop_verifier(
        config, policy, 8, [Prompt("p", np.zeros(1, np.int32), "4" * 300, np.zeros(0), "?")]
    )
    assert isinstance(verify, HostVerify) and verify.name == "my_rewards:score"
    assert encode([Prompt("p", np.zeros(1, np.int32), "4", np.zeros(0), "?")]).shape[1] > 300


@pytest.mark.parametrize("verifier", ["mathh", "a:b:c", ":f", "m:", ""])
def test_names_that_are_neither(verifier):
    config = Config()
    config.reward.verifier = verifier
    with pytest.raises(
        ValueError,
        match="config.reward.verifier must be one of exact, integer, scratchpad, math, or a "
        "function of yours",
    ):
        config.validate()
