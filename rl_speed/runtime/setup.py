"""Process-wide settings of JAX, of transformers and of the allocator for a run."""

import ctypes
import os
from pathlib import Path

import jax

# Of mallopt(3).
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def setup_jax() -> None:
    """Turn the persistent compilation cache on: in $JAX_COMPILATION_CACHE_DIR,
    or ~/.cache/rl_speed/xla. Keep freed memory. Before transformers is imported: no advice from it.
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
