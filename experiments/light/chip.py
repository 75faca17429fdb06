"""The chip: its name, memory, driver, and two measured ceilings: a large copy, a large product."""

import subprocess

import common
import jax
import jax.numpy as jnp

from rl_speed.targets import CHIPS

# A ceiling below this share of the published one is worth a look before anything else.
LEAST_SHARE = 0.5


def published() -> tuple[float, float] | None:
    """(bytes/s, bfloat16 FLOP/s) of this chip by its maker; None for a chip that is not listed."""
    kind = jax.devices()[0].device_kind.lower().replace(" ", "")
    names = {"v5lite": "v5e", "v6lite": "v6e", "v5": "v5p"}
    for part, name in {**{name: name for name in CHIPS}, **names}.items():
        if part in kind:
            return CHIPS[name].bandwidth, CHIPS[name].flops
    return None


def bandwidth(small: bool) -> float:
    """Bytes read and written a second by a large copy."""
    x = jax.random.normal(jax.random.key(0), (2**22 if small else 2**30,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / common.seconds_of(lambda: copy(x), 10)[0]


def product(small: bool) -> float:
    """FLOP/s of a large bfloat16 product of random matrices."""
    size = 512 if small else 8192
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    multiply = jax.jit(lambda x: x @ x)
    return 2 * size**3 / common.seconds_of(lambda: multiply(x), 10)[0]


def run(setting: common.Setting, found: common.Result) -> None:
    device = jax.devices()[0]
    found.figures |= {
        "kind": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "memory limit (bytes)": common.memory_limit(),
        "jax": jax.__version__,
    }
    if device.platform == "gpu":
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version,memory.total",
            "--format=csv,noheader",
        ]
        with found.attempt("nvidia-smi"):
            found.figures["driver"] = subprocess.check_output(query, text=True).strip()
    read = found.figures["copy (bytes/s)"] = bandwidth(setting.small)
    rate = found.figures["bf16 product (FLOP/s)"] = product(setting.small)
    if limits := published():
        found.at_least("copy, share of the published bandwidth", read / limits[0], LEAST_SHARE)
        found.at_least("product, share of the published rate", rate / limits[1], LEAST_SHARE)


if __name__ == "__main__":
    common.main(run)
