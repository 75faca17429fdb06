"""Screening with memory, simulated: the shuffle against closed forms,
what is saved and what cannot be, the command.
"""

import json

import numpy as np
import pytest

from lab import simulation
from lab.simulation.orders import Course, Memory, compare, follow, summary
from rl_speed import theory
from rl_speed.config import Config
from rl_speed.data.loaders import load_rows
from rl_speed.sampling import Speed
from rl_speed.training.stream import PRIOR

RULE = Speed(4, 8)


def test_defaults_are_those_of_training():
    d = Config().data
    assert Memory() == Memory(d.explore, d.max_unseen, d.rest, d.memory_decay, PRIOR)


def test_the_shuffle_costs_what_theory_says():
    rates = np.random.default_rng(0).beta(0.4, 0.8, 400)
    curves = np.stack([rates, rates**2, rates**2], axis=1)
    courses = [follow(curves, RULE, None, seed, 32) for seed in range(6)]
    accepted = theory.acceptance(curves, 4).mean(0)
    for epoch in range(3):
        share = sum(c.groups[epoch] for c in courses) / (
            screened := sum(c.screened[epoch] for c in courses)
        )
        assert share == pytest.approx(accepted[epoch], abs=4 * np.sqrt(0.25 / screened))
    for c in courses:
        # An epoch of the curves is one pass of the shuffle, up to the spread of what it accepts
        # and one call.
        assert np.abs(c.screened - 400).max() < 32 + 4 * np.sqrt(400 * 0.25) / accepted.min()
        assert 1 <= c.unseen < 2
    found = summary(courses, RULE)
    groups = sum(c.groups.sum() for c in courses)
    assert found["samples"] == pytest.approx(
        8 + 4 * sum(c.screened.sum() for c in courses) / groups, rel=0.02
    )
    # (N-1) E[s^2], per pass.
    information = (theory.phi_prime(curves, 4, 8) * curves * (1 - curves)).sum(0) * 11
    expected = information @ [1, 1, 1] / (found["samples"] * 400 * accepted.sum())
    assert found["signal"] == pytest.approx(expected, rel=0.05)


def test_tokens_and_a_given_clock():
    """Where nothing is ever refused, and where the wrong prompts are the long ones."""
    accept = Speed(4, 8, -np.inf, np.inf)
    lengths = np.array([[2.0, 4.0]] * 8 + [[6.0, 4.0]] * 8)
    course = follow(np.full((16, 2), 0.5), accept, None, 0, 16, np.array([16.0, 48.0]), lengths)
    assert course.groups.tolist() == [16, 32] and course.tokens.tolist() == [
        16 * 12 * 4,
        32 * 12 * 4,
    ]
    rates = np.repeat([[0.5], [0.0]], 50, axis=0)
    course = follow(rates, RULE, None, 0, 50, np.array([400.0]), np.where(rates == 0, 10.0, 1.0))
    # Visits, 40 tokens each, not 4.
    hopeless = (course.screened.sum() * 4 + course.groups.sum() * 8 - course.tokens.sum()) / -36
    assert (
        hopeless == pytest.approx(course.screened.sum() / 2, abs=50) and course.groups.sum() >= 400
    )


def test_numbers_of_a_course_by_hand():
    course = lambda groups, screened: Course(
        np.array(groups), np.array(screened), np.array([3.0, 1.0]), 1.5, 2.0, np.zeros(2)
    )
    found = summary([course([2, 2], [4, 8]), course([2, 2], [4, 4])], RULE)
    assert found["samples"] == pytest.approx(8 + 4 * np.mean([3, 2])) and found[
        "accepted"
    ] == pytest.approx(np.mean([4 / 12, 0.5]))
    assert found["by_epoch"] == pytest.approx([8 + 4 * 2, 8 + 4 * 3])
    assert found["signal"] == pytest.approx(np.mean([4 / 80, 4 / 64]))
    assert found["samples_error"] == pytest.approx(2.0)


def test_memory_saves_screening_where_there_is_something_to_remember():
    rates = np.concatenate([np.zeros(150), np.full(100, 0.5)])
    found = compare(
        np.tile(rates[:, None], (1, 12)),
        RULE,
        [Memory(), Memory(max_unseen=1.0)],
        repeats=2,
        call=20,
    )
    memory, queue = found["memory"]
    # Good prompts, two fifths of the data, may come every half epoch, as four fifths of the
    # screening; in the first pass they do not.
    assert (
        0.875 * 0.8 > memory["accepted"] > 0.875 * 0.6
        and memory["unseen"] <= 4
        and memory["screening_ratio"] > 1.4
    )
    assert (
        memory["ratio"] == pytest.approx(found["shuffle"]["samples"] / memory["samples"])
        and memory["ratio"] > 1.2
    )
    # A bound of one epoch leaves no choice.
    assert queue["ratio"] == pytest.approx(1, abs=0.05) and queue["unseen"] <= 1


def test_memory_saves_nothing_where_all_prompts_are_alike():
    found = compare(np.full((200, 6), 0.3), RULE, [Memory()], repeats=3, call=20)["memory"][0]
    assert found["ratio"] == pytest.approx(1, abs=4 * found["ratio_error"] + 0.01)
    assert found["signal_ratio"] == pytest.approx(1, abs=0.05)


def test_the_bound_holds_while_prompts_drift():
    rng = np.random.default_rng(1)
    curves = np.clip(np.cumsum(rng.normal(0.02, 0.08, (120, 15)), axis=1) - 0.1, 0, 1)
    for bound in (1.5, 3.0):
        assert follow(curves, RULE, Memory(max_unseen=bound), 0, 16).unseen <= bound


def test_courses_repeat_and_errors_need_repeats():
    curves = np.random.default_rng(0).random((60, 3))
    one, two = (follow(curves, RULE, Memory(), 3, 16) for _ in range(2))
    assert (
        np.array_equal(one.screened, two.screened)
        and one.information.tolist() == two.information.tolist()
    )
    with pytest.raises(ValueError, match="repeats must be at least 2, got 1"):
        compare(curves, RULE, [Memory()], repeats=1)


def test_so_few_prompts_that_all_are_out_are_refused():
    with pytest.raises(ValueError, match="all 2 prompts are out at once: 64 leave at a time"):
        follow(np.full((2, 1), 0.5), Speed(4, 4), Memory(), ends=np.array([100]))


def test_the_command(launch, tmp_path):
    rates, epochs, out = tmp_path / "rates.jsonl", tmp_path / "epochs.json", tmp_path / "out"
    rates.write_text("".join(json.dumps({"pass_rate": k / 80}) + "\n" for k in range(81)))
    epochs.write_text(json.dumps({str(k): [k / 90, 0.5, 1.0] for k in range(91)}))
    arguments = [
        "--orders",
        f"--pass_rates={rates}",
        f"--over_training={epochs}",
        "--window=1",
        "--n=12",
        "--n_init=4",
        "--repeats=2",
        f"--out={out}",
    ]
    done = launch("experiments/simulate.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} == {"table.md", "table.json", "orders.png"}
    saved, text = json.loads((out / "table.json").read_text()), (out / "table.md").read_text()
    assert [len(case["memory"]) > 1 for case in saved["cases"]] == [True, False] and str(
        tmp_path
    ) not in text
    for case in saved["cases"]:
        for row in case["memory"]:
            assert row["unseen"] <= row["settings"]["max_unseen"] and f"{row['ratio']:.3f}" in text


@pytest.mark.slow
def test_a_table_names_prompts_as_the_loaders_do(real_data):
    path = real_data / "deepscaler" / "deepscaler_40k.jsonl.gz"
    table = simulation.load_pass_rate_table(path)
    rows, report = load_rows(path, "skip")  # a row without an answer has its pass rate all the same
    assert set(table) >= {row.id for row in rows} and len(table) == len(rows) + report.bad
    assert (
        table["deepscaler-L1-0"] == pytest.approx(1 - 0.4453125)
        and table["deepscaler-L1-8"] is None
    )
