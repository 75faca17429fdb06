"""Host state through a checkpoint: every type, empty things, and the newest finished step."""

import jax.numpy as jnp
import numpy as np
import pytest

from rl_speed.runtime.checkpoint import Checkpointer, join_host, split_host

HOST = {
    "a": {
        "n": 3,
        "x": 0.25,
        "text": "t",
        "none": {},
        "empty": np.zeros((0, 4), np.int32),
        "deep": {"v": np.arange(3)},
    },
    "flag": True,
    "list": [1, 2],
}


def same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, dict):
            same(value, b[name])
        elif isinstance(value, np.ndarray):
            assert value.dtype == b[name].dtype and value.shape == b[name].shape
            np.testing.assert_array_equal(value, b[name])
        else:
            assert value == b[name]


def test_split_and_join_are_inverse():
    same(HOST, join_host(*split_host(HOST)))
    with pytest.raises(ValueError, match="must not contain '/'"):
        split_host({"a/b": 1})


def test_round_trip_keeps_the_newest(tmp_path):
    state = {"w": jnp.arange(4.0), "step": jnp.int32(7)}
    saver = Checkpointer(tmp_path, keep=2)
    assert saver.latest() is None
    for step in (2, 4, 6):
        saver.save(step, {**state, "step": jnp.int32(step)}, {**HOST, "at": step})
    saver.close()
    again = Checkpointer(tmp_path, keep=2)
    assert again.latest() == 6
    restored, host = again.restore(6, state)
    assert int(restored["step"]) == 6 and restored["w"].tolist() == [0, 1, 2, 3]
    same({**HOST, "at": 6}, host)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.isdigit()) == ["4", "6"]
    again.close()
