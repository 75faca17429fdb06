"""State of a training run on its devices, and the sharding of each array."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from rl_speed.mesh import TRAIN_RULES, replicated
from rl_speed.policy import ModelConfig, abstract_params, param_shardings
from rl_speed.policy.transformer import trainable


@struct.dataclass
class TrainState:
    """All state that the update changes; donated to it.

    Attributes:
      params: float32 master weights, all of them. opt_state: the optimizer's, of the trainable
        weights alone (`policy.transformer.trainable`).
      step: i32[], optimizer updates applied. skipped: i32[], all updates skipped for a non-finite
        loss or gradient.
      skipped_in_row: i32[], updates skipped since the last applied one.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    skipped: jax.Array
    skipped_in_row: jax.Array


def state_shardings(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """A TrainState of NamedShardings: weights by the table of logical axes, optimizer moments like
    their weights.
    """
    params = param_shardings(config, mesh, TRAIN_RULES)
    whole = replicated(mesh)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, trainable(config, abstract_params(config))),
        trainable(config, params),
        transform_non_params=lambda _: whole,
    )
    return TrainState(
        params=params, opt_state=opt_state, step=whole, skipped=whole, skipped_in_row=whole
    )


def init_state(
    params: Any, optimizer: optax.GradientTransformation, shardings: TrainState
) -> TrainState:
    """The state at step 0, placed on the mesh.

    Copies `params`, because the update may donate the state.
    """

    def zero():
        return jnp.zeros((), jnp.int32)

    def build(params):
        params = jax.tree.map(jnp.copy, params)
        # No moments of weights that are not trained: the shardings have None for those.
        opt_state = jax.tree.map(
            lambda sharding, x: None if sharding is None else x,
            shardings.opt_state,
            optimizer.init(params),
            is_leaf=lambda x: x is None,
        )
        return TrainState(
            params=params, opt_state=opt_state, step=zero(), skipped=zero(), skipped_in_row=zero()
        )

    return jax.jit(build, out_shardings=shardings)(params)


def make_snapshot(shardings: TrainState):
    """Jitted params -> a copy with the same sharding: a reference policy that survives the donation
    of the state.
    """
    return jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=shardings.params)


def is_sound(state: TrainState) -> bool:
    """Whether a state is there, its computation having gone well, with weights that are finite."""
    if any(leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        return False
    try:
        return all_finite(state.params)
    except jax.errors.JaxRuntimeError:
        return False


def all_finite(tree: Any) -> bool:
    """Whether all numbers of a tree of arrays are finite: one reduction on their devices, of which
    all processes of a run get the same result.
    """
    return bool(_all_finite(jax.tree.leaves(tree)))


@jax.jit
def _all_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all()
