"""Accuracy, by class, with its standard error; the calls that an evaluation is cut into."""

import numpy as np
import pytest

from rl_speed.data.prompts import Prompt
from rl_speed.evaluation import Evaluation, evaluate
from rl_speed.sampling.generate import Drawn, GenerationStats


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

    def generator(params, work):
        largest.append(len(work))
        drawn = [Drawn(np.array([[w.prompt.visit * 10 + i] for i in range(w.count)], np.int32),
                       np.full((w.count, 1), -0.5 * (1 + w.prompt.visit)),
                       np.full(w.count, 1 + w.prompt.visit), np.zeros(w.count, bool)) for w in work]
        return drawn, GenerationStats(1, 3 * len(work), 3 * len(work), 1, 1)

    # Sample i of prompt v is right where v + i is even.
    right = lambda owners, drawn: (drawn.tokens[:, 0] // 10 + drawn.tokens[:, 0] % 10) % 2 == 0
    result = evaluate(generator, None, prompts, 3, right, prompts_per_call)
    assert result.correct.tolist() == [2, 1, 2, 1, 2, 1, 2] and max(largest) <= prompts_per_call
    assert result.lengths.tolist() == [1, 2, 3, 4, 5, 6, 7] and result.stats.samples == 21
    assert result.entropy.tolist() == [0.5] * 7
    assert result.classes == tuple("abababa")
