"""The serving benchmark on a tiny policy: all ways say the same."""

import pytest

from lab.benchmark import serving


def test_server_engine_and_sampler_do_the_same_work():
    pytest.importorskip("uvicorn", reason="the extra rl_speed[serve] is not installed")
    numbers = serving.run(serving.SMALL, repeats=1, say=lambda text: None)
    assert serving.verdicts(numbers) == {"complete": True, "same_tokens": True}
    assert numbers["ratio"] > 0 and "one_at_a_time" in serving.table(numbers)
