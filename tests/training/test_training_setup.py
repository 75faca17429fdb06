"""Process-wide settings."""

import platform

import pytest

from rl_speed.runtime.setup import keep_freed_memory

# Page faults of writing all of a fresh block that is larger than what glibc keeps by itself, the
# fourth time: before and after.
SCRIPT = """
import ctypes, resource
from rl_speed.runtime.setup import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = \
ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 48 << 20
def faults():
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = libc.malloc(size)
        ctypes.memset(block, 1, size)
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults())
assert keep_freed_memory()
print(faults())
"""


def test_the_users_own_choice_is_left_alone(monkeypatch):
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    assert keep_freed_memory() is False


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an allocator setting of glibc")
def test_large_blocks_are_not_fetched_from_the_kernel_each_time(launch, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = launch(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert before > 10 and after < before / 10
