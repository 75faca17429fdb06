"""Process-wide settings of JAX, transformers and the memory allocator for a run."""

import ctypes
import os
from pathlib import Path

import jax

# CPU devices allowed even above the number of cores.
FEW_DEVICES = 8

# Parameters of mallopt(3).
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3


def setup_jax(devices: int = 1) -> None:
    """Set up JAX for a run. Call it before transformers is imported, to silence its advice.

    It sets `devices` devices on a CPU (`share_processors`), the persistent compilation cache in
    $JAX_COMPILATION_CACHE_DIR or ~/.cache/rl_speed/xla, and `keep_freed_memory`.
    """
    default = Path.home() / ".cache" / "rl_speed" / "xla"
    jax.config.update(
        "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(default))
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    # transformers would print that PyTorch is absent and only tokenizers work, which is intended.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    keep_freed_memory()
    share_processors(devices)


def share_processors(devices: int) -> bool:
    """Make JAX's CPU platform offer `devices` devices, which run in parallel.

    A single device uses a second core only in large operations.

    Returns False if nothing was changed: for one device, for more devices than both the cores and
    FEW_DEVICES (building the mesh then fails), or if the user has set a number in XLA_FLAGS.

    Raises RuntimeError: JAX was used before, so its devices exist.
    """
    most = max(FEW_DEVICES, os.cpu_count() or 1)
    own = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not 1 < devices <= most or own:
        return False
    jax.config.update("jax_num_cpu_devices", devices)
    return True


def keep_freed_memory() -> bool:
    """Make glibc keep large freed blocks for the next allocation.

    On a CPU device XLA allocates a program's workspace in every call. Blocks above 32 MiB come from
    the kernel each time, page by page, which can cost a quarter of a step's time.

    Returns False if the C library is another one, the call fails, or the user has set
    MALLOC_MMAP_THRESHOLD_.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ:  # set by the user
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
