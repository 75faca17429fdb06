"""The benchmark's own arithmetic, and the schedule that it measures, on a tiny policy."""

import numpy as np
import pytest

from rl_speed.benchmark import sampler


def test_list_schedule_by_hand():
    steps, starts = sampler.list_schedule([3, 1, 2, 2], slots=2)
    assert steps == 5 and starts.tolist() == [0, 0, 1, 3]
    assert sampler.occupancy(starts, np.array([3, 1, 2, 2]), steps).tolist() == [2, 2, 2, 1, 1]


@pytest.fixture(scope="module")
def numbers():
    return sampler.run(sampler.SMALL, repeats=1, say=lambda text: None)


def test_schedule_meets_its_targets(numbers):
    assert numbers["mean_length_share"] <= 0.3
    for key, target, _ in sampler.TARGETS:
        assert numbers[key] >= target, key
    assert numbers["same_tokens"]


def test_results_can_be_read_and_drawn(numbers, tmp_path):
    assert "MISSED" not in sampler.table(numbers)
    sampler.plot(numbers, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    busy = sampler.occupancy(np.array(numbers["starts"]["ours"]), np.array(numbers["lengths"]), numbers["decode_steps"])
    assert busy.sum() == numbers["tokens"]
