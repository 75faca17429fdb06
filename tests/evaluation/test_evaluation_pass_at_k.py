"""pass@k against enumeration of all subsets."""

import itertools

import numpy as np
import pytest

from rl_speed.evaluation import Evaluation, pass_at_k
from rl_speed.sampling.generate import GenerationStats


@pytest.mark.parametrize("n", [1, 4, 7])
def test_equals_enumeration(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        answers = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(answers, k))
        assert pass_at_k(c, n, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_arrays_and_large_counts():
    got = pass_at_k(np.array([0, 1, 500, 1000]), np.full(4, 1000), 100)
    assert got.shape == (4,) and got[0] == 0 and got[3] == 1
    assert got[1] == pytest.approx(0.1) and np.isfinite(got).all()


@pytest.mark.parametrize("c,n,k", [(1, 4, 0), (1, 4, 5), (5, 4, 1), (-1, 4, 1)])
def test_out_of_range_is_refused(c, n, k):
    with pytest.raises(ValueError):
        pass_at_k(c, n, k)


def test_accuracy_by_class_and_its_standard_error():
    result = Evaluation(4, np.array([4, 2, 0, 2]), np.ones(4), np.zeros(4), ("a", "a", "b", "b"), GenerationStats())
    metrics = result.metrics()
    assert metrics["eval/accuracy"] == 0.5 and metrics["eval/accuracy_a"] == 0.75 and metrics["eval/accuracy_b"] == 0.25
    # Two prompts of variance 1/4, estimated from 4 samples: sqrt(2 * (1/4) / 3) / 4.
    assert result.standard_error == pytest.approx(np.sqrt(0.5 / 3) / 4)
