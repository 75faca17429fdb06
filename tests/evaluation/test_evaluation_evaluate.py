"""Accuracy, by class, with its standard error; the calls that an evaluation is cut into."""

from types import SimpleNamespace

import numpy as np
import pytest

from rl_speed.data.prompts import Prompt
from rl_speed.evaluation import Evaluation, evaluate
from rl_speed.rollout.evaluate import draw_in_calls, plan_calls
from rl_speed.rollout.generate import Drawn, FinishedDraw, GenerationStats

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_accuracy_by_class_and_its_standard_error():
    result = Evaluation(4, np.array([4, 2, 0, 2]), np.ones(4), np.zeros(4), np.array([0.0, 0.2, 0.4, 1.0]), ("a", "a", "b", "b"),
                        GenerationStats())
    metrics = result.metrics()
    assert metrics["eval/accuracy"] == 0.5 and metrics["eval/accuracy_a"] == 0.75 and metrics["eval/accuracy_b"] == 0.25
    assert metrics["eval/entropy"] == pytest.approx(0.4) and metrics["eval/entropy_b"] == pytest.approx(0.7)
    # Of four samples all, two, none, two are right: two of them hold a right one with probability 1, 5/6, 0, 5/6.
    assert metrics["eval/pass_at_2"] == pytest.approx((1 + 5 / 3) / 4) and metrics["eval/pass_at_4"] == 0.75
    assert "eval/pass_at_8" not in metrics
    # Two prompts of variance 1/4, estimated from 4 samples: sqrt(2 * (1/4) / 3) / 4.
    assert result.standard_error == pytest.approx(np.sqrt(0.5 / 3) / 4)


@pytest.mark.parametrize("prompts_per_call", [1, 3, 7, 20])
def test_results_do_not_depend_on_how_prompts_are_cut_into_calls(prompts_per_call):
    prompts = [Prompt(f"p{i}", np.array([1], np.int32), "1", np.array([1], np.int32), "?", meta={"class": "ab"[i % 2]})
               for i in range(7)]
    largest = []

    def draw(params, work):
        largest.append(len(work))
        drawn = [Drawn(np.array([[w.prompt.visit * 10 + i] for i in range(w.count)], np.int32),
                       np.full((w.count, 1), -0.5 * (1 + w.prompt.visit)),
                       np.full(w.count, 1 + w.prompt.visit), np.zeros(w.count, bool)) for w in work]
        return FinishedDraw(drawn, GenerationStats(1, 3 * len(work), 3 * len(work), 1, 1))

    # Sample i of prompt v is right where v + i is even.
    right = lambda owners, drawn: (drawn.tokens[:, 0] // 10 + drawn.tokens[:, 0] % 10) % 2 == 0
    result = evaluate(SimpleNamespace(dispatch=draw), None, prompts, 3, right, prompts_per_call)
    assert result.correct.tolist() == [2, 1, 2, 1, 2, 1, 2] and max(largest) <= prompts_per_call
    assert result.lengths.tolist() == [1, 2, 3, 4, 5, 6, 7] and result.stats.samples == 21
    assert result.entropy.tolist() == [0.5] * 7
    assert result.classes == tuple("abababa")


@pytest.mark.parametrize("samples,pieces,piece", [(5, 3, 5), (5, 3, 2), (1, 4, 1), (7, 1, 3), (4, 100, 4)])
@pytest.mark.parametrize("first", [0, 3, 11, 28])
def test_a_plan_covers_every_response_once_in_order(samples, pieces, piece, first):
    calls = plan_calls(6, samples, pieces, piece, first)
    drawn = [prompt * samples + start + i for call in calls for prompt, start, count in call for i in range(count)]
    assert drawn == list(range(first, 6 * samples))
    assert all(len(call) <= pieces and all(1 <= count <= piece for _, _, count in call) for call in calls)
    # Whatever was drawn before, the pieces after the first are those of the whole plan.
    whole = [item for call in plan_calls(6, samples, pieces, piece) for item in call]
    rest = [item for call in calls for item in call]
    assert rest[1:] == whole[len(whole) - len(rest) + 1:] if rest else first >= 6 * samples


def test_what_is_dispatched_is_handed_out_also_when_stopped():
    events = []

    def dispatch(params, work):
        events.append(("dispatch", work[0].prompt))
        n = work[0].count
        drawn = Drawn(np.zeros((n, 1), np.int32), np.zeros((n, 1)), np.ones(n, np.int32), np.zeros(n, bool))
        return FinishedDraw([drawn], GenerationStats(1))

    prompts = ["a", "b", "c", "d"]
    stop = lambda: len(events) >= 4
    for owners, _, _ in draw_in_calls(SimpleNamespace(dispatch=dispatch), None, prompts, plan_calls(4, 2, 1, 2), stop):
        events.append(("result", prompts[owners[0][0]]))
    # The next call is under way while a result is looked at.
    assert events == [("dispatch", "a"), ("dispatch", "b"), ("result", "a"), ("dispatch", "c"), ("result", "b"), ("result", "c")]
