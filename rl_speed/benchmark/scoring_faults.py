"""What the workers of `bench.py scoring` run: math-verify's verdict, or a planted fault. Imported by the workers only."""

import os
import signal
import time

from rl_speed.rewards.grading import grade

def grade_or_fail(kind: str, response: str, gold: str):
    """The verdict (kind "") or the fault that `kind` names; `scoring.FAULTS` has the cause that the pool counts."""
    if kind == "hang":  # only SIGKILL ends it
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.valid_signals()))
        time.sleep(3600)
    elif kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "memory":
        return float(len(bytearray(64 << 30)))
    return grade(response, gold, "boxed", 6, True, False)
