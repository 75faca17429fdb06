"""The serving benchmark on a tiny policy: all three ways say the same."""

import pytest

from lab.benchmark import serving


def test_server_engine_and_sampler_do_the_same_work():
    pytest.importorskip("jetstream", reason="the extra rl_speed[jetstream] is not installed")
    numbers = serving.run(serving.SMALL, repeats=1, say=lambda text: None)
    assert numbers["same_responses"] == dict.fromkeys(serving.WAYS, serving.SMALL.requests)
    assert serving.verdicts(numbers) == {"complete": True, "same_tokens": True}
    assert numbers["ratio"] > 0 and "jetstream" in serving.table(numbers)
