"""Accuracy, by class, with its standard error; the calls that an evaluation is cut into."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from fake_generation import answer, finished

from rl_speed.data.prompts import Prompt
from rl_speed.evaluation import Evaluation, evaluate
from rl_speed.rollout.evaluate import draw_in_calls, plan_calls
from rl_speed.rollout.generate import GenerationStats

pytestmark = pytest.mark.usefixtures("quick_compiles")


def test_accuracy_by_class_and_its_standard_error():
    result = Evaluation(
        4,
        np.array([4, 2, 0, 2]),
        np.ones(4),
        np.zeros(4),
        np.array([0.0, 0.2, 0.4, 1.0]),
        ("a", "a", "b", "b"),
        GenerationStats(),
    )
    metrics = result.metrics()
    assert (
        metrics["eval/accuracy"] == 0.5
        and metrics["eval/accuracy_a"] == 0.75
        and metrics["eval/accuracy_b"] == 0.25
    )
    assert metrics["eval/entropy"] == pytest.approx(0.4) and metrics[
        "eval/entropy_b"
    ] == pytest.approx(0.7)
    # Of four samples all, two, none, two are right: two of them hold a right one with probability
    # 1, 5/6, 0, 5/6.
    assert (
        metrics["eval/pass_at_2"] == pytest.approx((1 + 5 / 3) / 4)
        and metrics["eval/pass_at_4"] == 0.75
    )
    assert "eval/pass_at_8" not in metrics
    # Two prompts of variance 1/4, estimated from 4 samples: sqrt(2 * (1/4) / 3) / 4.
    assert result.standard_error == pytest.approx(np.sqrt(0.5 / 3) / 4)


@pytest.mark.parametrize("prompts_per_call", [1, 3, 7, 20])
def test_results_do_not_depend_on_how_prompts_are_cut_into_calls(prompts_per_call):
    prompts = [
        Prompt(
            f"p{i}",
            np.array([1], np.int32),
            "1",
            np.array([1], np.int32),
            "?",
            meta={"class": "ab"[i % 2]},
        )
        for i in range(7)
    ]
    largest = []

    def draw(params, requests):
        largest.append(len(requests))
        drawn = answer(
            requests,
            lambda request, i: [request.prompt.visit * 10 + i] + [0] * request.prompt.visit,
        )
        drawn = dataclasses.replace(drawn, logprobs=drawn.logprobs / 2)
        return finished(drawn, GenerationStats(1, len(drawn), len(drawn), 1, 1))

    # Sample i of prompt v is right where v + i is even.
    right = lambda rollouts: (rollouts.tokens[:, 0] // 10 + rollouts.tokens[:, 0] % 10) % 2 == 0
    result = evaluate(SimpleNamespace(dispatch=draw), None, prompts, 3, right, prompts_per_call)
    assert result.correct.tolist() == [2, 1, 2, 1, 2, 1, 2] and max(largest) <= prompts_per_call
    assert result.lengths.tolist() == [1, 2, 3, 4, 5, 6, 7] and result.stats.samples == 21
    assert result.entropy.tolist() == [0.5] * 7
    assert result.classes == tuple("abababa")


@pytest.mark.parametrize(
    "samples,pieces,piece", [(5, 3, 5), (5, 3, 2), (1, 4, 1), (7, 1, 3), (4, 100, 4)]
)
@pytest.mark.parametrize("first", [0, 3, 11, 28])
def test_a_plan_covers_every_response_once_in_order(samples, pieces, piece, first):
    calls = plan_calls(range(6), samples, pieces, piece, first)
    drawn = [
        r.prompt * samples + r.first + i for call in calls for r in call for i in range(r.count)
    ]
    assert drawn == list(range(first, 6 * samples))
    assert all(len(call) <= pieces and all(1 <= r.count <= piece for r in call) for call in calls)
    # Whatever was drawn before, the pieces after the first are those of the whole plan.
    whole = [request for call in plan_calls(range(6), samples, pieces, piece) for request in call]
    rest = [request for call in calls for request in call]
    assert rest[1:] == whole[len(whole) - len(rest) + 1 :] if rest else first >= 6 * samples


def test_what_is_dispatched_is_handed_out_also_when_stopped():
    events = []

    def dispatch(params, requests):
        events.append(("dispatch", requests[0].prompt.id))
        return finished(answer(requests, lambda request, i: [0]))

    prompts = [
        Prompt(name, np.array([1], np.int32), "1", np.array([1], np.int32), "?") for name in "abcd"
    ]
    stop = lambda: len(events) >= 4
    for rollouts, _ in draw_in_calls(
        SimpleNamespace(dispatch=dispatch), None, plan_calls(prompts, 2, 1, 2), stop
    ):
        assert rollouts.sample_index.tolist() == [0, 1]
        events.append(("result", rollouts.prompt.id))
    # The next call is under way while a result is looked at.
    assert events == [
        ("dispatch", "a"),
        ("dispatch", "b"),
        ("result", "a"),
        ("dispatch", "c"),
        ("result", "b"),
        ("result", "c"),
    ]
