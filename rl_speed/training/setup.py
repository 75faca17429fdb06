"""Process-wide settings of JAX for a run."""

import os
from pathlib import Path

import jax


def setup_jax() -> None:
    """Turn the persistent compilation cache on: in $JAX_COMPILATION_CACHE_DIR, or ~/.cache/rl_speed/xla."""
    default = Path.home() / ".cache" / "rl_speed" / "xla"
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(default)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
