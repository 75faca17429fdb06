"""`rl_speed.objectives` and `rl_speed.theory` stay light enough to lift into other code."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "room, forbidden",
    [
        ("objectives", {"transformers", "orbax", "math_verify", "torch", "flax", "optax"}),
        ("theory", {"jax", "transformers", "orbax", "math_verify", "torch", "flax", "optax"}),
    ],
)
def test_importing_a_room_pulls_in_nothing_heavy(room, forbidden):
    code = f"import sys, rl_speed.{room}; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not forbidden & set(out.stdout.split())
