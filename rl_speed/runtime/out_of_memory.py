"""Memory per device of RL and of supervised fine-tuning, and the out-of-memory message."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from rl_speed.policy import ModelConfig
from rl_speed.policy.transformer import trainable
from rl_speed.update.state import HOST, TrainState, state_shardings


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error is XLA's report that a device ran out of memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def explain(
    error: Exception, parts: Sequence[tuple[str, Mapping[str, int], str]], last: str = ""
) -> str:
    """Out-of-memory message with the bytes of each part and the settings to lower.

    Args:
      parts: for each program (title, {part: bytes per device}, settings that reduce them).
      last: a line at the end.
    """
    lines = [f"a device ran out of memory: {str(error).strip().splitlines()[0]}"]
    for title, known, advice in parts:
        lines += [
            f"  {title} holds {size_text(sum(known.values()))} per device, without activations; "
            f"lower {advice}"
        ]
        lines += [f"    {part:<30} {size_text(size)}" for part, size in known.items()]
    return "\n".join([*lines, *([f"  {last}"] if last else [])])


def device_bytes(tree: Any) -> int:
    """Bytes per device of a pytree of (abstract) arrays. An array without a sharding counts in
    full, one in the host's memory not at all.
    """

    def one(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        if getattr(sharding, "memory_kind", None) == HOST:
            return 0
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return math.prod(shape) * np.dtype(x.dtype).itemsize

    return sum(map(one, jax.tree.leaves(tree)))


def abstract_state(
    model: ModelConfig, params: Any, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Builds the train state as shapes with shardings, from (abstract) parameters."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    shapes = TrainState(
        params=params,
        opt_state=jax.eval_shape(optimizer.init, trainable(model, params)),
        step=scalar,
        skipped=scalar,
        skipped_in_row=scalar,
    )
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        state_shardings(model, optimizer, mesh),
    )


# The part that stays on the device while other programs run.
WAITING = "optimizer"


def sharded_weights(params: Any) -> dict[str, int]:
    """Bytes per device of the weights; with adapters most are in the compute dtype."""
    kept = jnp.dtype(params["embed"].dtype).name
    return {f"weights (sharded, {kept})": device_bytes(params)}


def update_parts(state: TrainState, model: ModelConfig) -> dict[str, int]:
    """Bytes per device of the update, by part."""
    return {
        **sharded_weights(state.params),
        WAITING: device_bytes(state.opt_state),
        "gradients": device_bytes(trainable(model, state.params)),
    }


def size_text(count: int) -> str:
    """A readable size, such as "1.50 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
