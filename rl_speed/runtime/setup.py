"""Process-wide settings of JAX, of transformers and of the allocator for a run."""

import ctypes
import os
from pathlib import Path

import jax

# Of a CPU, whatever the number of its cores.
FEW_DEVICES = 8

# Of mallopt(3).
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3


def setup_jax(devices: int = 1) -> None:
    """Have `devices` devices where JAX runs on a CPU (`share_processors`). Turn the persistent
    compilation cache on: in $JAX_COMPILATION_CACHE_DIR, or ~/.cache/rl_speed/xla. Keep freed
    memory. Before transformers is imported: no advice from it.
    """
    default = Path.home() / ".cache" / "rl_speed" / "xla"
    jax.config.update(
        "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(default))
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # transformers would say on stderr that PyTorch is absent and that only its tokenizers can be
    # used, which is what is wanted of it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    keep_freed_memory()
    share_processors(devices)


def share_processors(devices: int) -> bool:
    """Have JAX's CPU platform offer so many devices, which then work at the same time: an
    operation of one device uses a second core only if it is large.

    False where nothing was changed: one device; more than there are processors, and more than a few
    to try things with, which the mesh then refuses; or a number in XLA_FLAGS, the user's own.

    Raises RuntimeError: JAX has been used already, so that its devices are made.
    """
    most = max(FEW_DEVICES, os.cpu_count() or 1)
    own = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not 1 < devices <= most or own:
        return False
    jax.config.update("jax_num_cpu_devices", devices)
    return True


def keep_freed_memory() -> bool:
    """Have glibc keep large freed blocks for the next allocation.

    False where the C library is another one, or refuses.

    On a CPU device XLA allocates a program's workspace anew in every call. Blocks above 32 MiB come
    from the kernel each time, page by page: a quarter of the time of a step whose workspace is a
    little larger than that.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:  # the user's own choice
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all(
        [
            mallopt(M_MMAP_THRESHOLD, 2**30),
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1),
            mallopt(M_TOP_PAD, 2**26),
        ]
    )
