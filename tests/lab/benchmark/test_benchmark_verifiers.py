"""The NumPy twin of the exact verifier that the benchmark times, and its table."""

import numpy as np

from lab.benchmark.verifiers import numpy_exact, table
from rl_speed.rewards import ExactMatch


def test_numpy_exact_is_the_exact_verifier():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (400, 4)).astype(np.int32)
    lengths = rng.integers(1, 5, 400).astype(np.int32)
    # A response ends with its first end token, as the sampler's do.
    ends = (tokens == 0).any(axis=1)
    lengths = np.where(ends, np.minimum(lengths, np.argmax(tokens == 0, axis=1) + 1), lengths)
    answers = rng.integers(1, 3, (400, 5)).astype(np.int32)
    answer_lengths = rng.integers(0, 3, 400).astype(np.int32)
    right = numpy_exact((0,))(tokens, lengths, (answers, answer_lengths))
    np.testing.assert_array_equal(
        right, ExactMatch((0,))(tokens, lengths, (answers, answer_lengths))
    )
    assert 10 < right.sum() < 300


def test_table():
    numbers = {
        "groups": 2,
        "candidates": 8,
        "slots": 4,
        "tokens": 1000,
        "decode_steps": 20,
        "same_rewards": True,
        "workers": 2,
        "verifiers": {
            "exact, in JAX": {"median_s": 0.01},
            "math-verify": {
                "median_s": 0.03,
                "calls_a_run": 10,
                "rows_a_run": 50,
                "seconds_a_run": 0.015,
            },
        },
    }
    lines = table(numbers).splitlines()
    assert lines[4].split() == ["math-verify", "30.0", "3.00", "10", "5.0", "2.00", "1.50"]
