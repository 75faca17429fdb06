"""`rl_speed.objectives` stays light enough to lift into other code."""

import subprocess
import sys


def test_importing_objectives_pulls_in_nothing_heavy():
    forbidden = {"transformers", "orbax", "math_verify", "torch", "flax", "optax"}
    code = "import sys, rl_speed.objectives; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not forbidden & set(out.stdout.split())
