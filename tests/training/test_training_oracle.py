"""An oracle's pass rates: what it picks, and that its cost is nobody's."""

import numpy as np
import pytest

from rl_speed.config.presets import embedded, tiny
from rl_speed.data.orders import OracleOrder
from rl_speed.runtime.metrics import read_lines
from rl_speed.runtime.signals import Stopped
from rl_speed.training.loop import Trainer


def test_worth_most_first_each_once_until_all_have_gone():
    order = OracleOrder(6, seed=0, by_tokens=True)
    free = np.zeros(6, bool)
    assert len(set(order.pick(3, 0, free).tolist())) == 3  # anything, before it knows
    # p (1-p) / tokens: 0.25 / 10, 0.25 / 20, 0 and 0.09 / 2.
    order.learn(0, np.array([1, 2, 4, 5]), np.array([0.5, 0.5, 1.0, 0.1]), np.array([10, 20, 5, 2]))
    assert order.pick(2, 0, free).tolist() == [5, 1]
    assert order.metrics(0) == {"prompts/oracle_gone": 0.5}
    out = free.copy()
    out[2] = True
    # What is out cannot go; those that have gone follow, before what was never measured.
    assert order.pick(2, 2, out).tolist() == [4, 5]
    again = OracleOrder(6, seed=0, by_tokens=True)
    again.load_state_dict(order.state_dict())
    assert again.pick(6, 4, free).tolist() == order.pick(6, 4, free).tolist()
    assert again.at == 0 and again.pool(3)[0] == order.pool(3)[0] == "oracle 1"


def test_worth_is_of_samples_and_prefers_what_is_seldom_solved_where_asked():
    free, rates = np.zeros(4, bool), np.array([0.0, 0.1, 0.5, 0.9])
    for power, best in ((1.0, [2]), (0.25, [1])):
        order = OracleOrder(4, seed=0, power=power)
        order.learn(0, np.arange(4), rates, np.array([1.0, 9.0, 9.0, 1.0]))
        worth = rates**power * (1 - rates)
        assert order.pick(1, 0, free).tolist() == best == [int(np.argmax(worth))]


def test_every_measurement_has_prompts_of_its_own():
    order, pools = OracleOrder(50, seed=1), []
    for step in range(3):
        name, index = order.pool(20)
        assert name == f"oracle {step}" and len(set(index.tolist())) == 20
        pools.append(index.tolist())
        order.learn(step, index, np.full(20, 0.5), np.ones(20))
    assert pools[0] != pools[1] != pools[2]


@pytest.fixture(scope="module")
def config():
    config = tiny(embedded("oracle_rloo"), 4, train_prompts=40, eval_prompts=8)
    config.data.oracle_every, config.data.oracle_prompts, config.data.oracle_samples = 2, 30, 4
    return config


def test_a_run_is_charged_for_its_own_samples_and_resumes_exactly(config, tmp_path):
    whole = Trainer(config, tmp_path / "whole")
    whole.run()
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    rows = config.driver.groups * config.rule.n
    assert [line["rollout/generated_samples"] for line in lines] == [rows] * 4
    assert whole.stream.order.at == 2

    cut = Trainer(config, tmp_path / "cut")
    seen, measure = [], cut.oracle.measure

    def counted(params, step, stop):
        seen.append(step)
        return measure(params, step, stop)

    cut.oracle.measure = counted
    with pytest.raises(Stopped, match="a measurement of pass rates"):
        cut.run(lambda: 2 in seen)  # asked for inside the second one
    again = Trainer(config, tmp_path / "cut")
    again.run()
    resumed = read_lines(tmp_path / "cut" / "metrics.jsonl")
    for mine, theirs in zip(resumed, lines, strict=True):
        for name in (
            "step",
            "train/reward",
            "train/accuracy",
            "rollout/generated_tokens",
            "train/loss",
            "train/grad_norm",
        ):
            assert mine[name] == theirs[name], name


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("data.oracle_samples", 99, "config.data.oracle_samples=99 are more than the"),
        ("data.oracle_every", 0, "config.data.oracle_every must be 1 or more"),
        ("driver.lag", 1, "config.driver.lag and config.driver.depth must be 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(field, value, said):
    config = embedded("oracle_rloo")
    config.set(field, value)
    with pytest.raises(ValueError, match=said):
        config.validate()


def test_an_oracle_that_values_what_is_never_solved_is_refused():
    config = tiny(embedded("oracle_rloo"), 4, train_prompts=40, eval_prompts=8)
    config.data.worth_power = 0.0
    with pytest.raises(ValueError, match="not 0 with config.data.order=oracle"):
        config.validate()
