"""Process-wide settings."""

import platform
import subprocess
import sys

import pytest

from rl_speed.training.setup import keep_freed_memory

# Seconds to write all of a fresh block that is larger than what glibc keeps by itself, the third time.
SCRIPT = """
import ctypes, resource, sys
from rl_speed.training.setup import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 48 << 20
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_the_users_own_choice_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert keep_freed_memory() is False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an allocator setting of glibc")
def test_large_blocks_are_not_fetched_from_the_kernel_each_time():
    faults = {mode: int(subprocess.run([sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True).stdout)
              for mode in ("leave", "keep")}
    assert faults["leave"] > 10 and faults["keep"] < faults["leave"] / 10, faults
