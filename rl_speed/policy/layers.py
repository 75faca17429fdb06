"""The pass through stacked layers and back: what is kept, recomputed, and where gradients go."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from rl_speed.policy.block import Array, Params
from rl_speed.policy.config import ModelConfig

# Up to this many layers are unrolled on a CPU: they compile fast, and the backward pass needs no
# copies into stacked arrays. (The TPU compiler crashes on unrolled layers that are gathered over
# fsdp and split over tensor.)
UNROLLED_LAYERS = 4


class Adding(NamedTuple):
    """Stacked layers whose gradients are added to `totals`; see `adding`."""

    weights: Params
    totals: Params


def adding(params: Params, totals: Params, config: ModelConfig) -> Params:
    """Weights for `hidden_states` and `token_logprobs`. The gradient with respect to `totals` is
    `totals` plus theirs; no gradient flows to `params`.

    So no second tree of gradients is held. If layers are recomputed (`config.remat`), each layer's
    gradient is added in place as soon as it is computed.

    Args:
      params, totals: trees of `weights(config)`, the latter float32.
    """
    plain = {
        name: jax.tree.map(_add_to, part, totals[name])
        for name, part in params.items()
        if name != "layers" or not config.remat
    }
    return {"layers": Adding(params["layers"], totals["layers"]), **plain}


@jax.custom_vjp
def _add_to(weight: Array, total: Array) -> Array:
    return weight


_add_to.defvjp(lambda weight, total: (weight, total), lambda total, g: (None, total + g))


def through_layers(
    step: Callable[[Array, Params], Array],
    x_NxD: Array,
    layers: Params | Adding,
    config: ModelConfig,
) -> Array:
    """Apply `step(x, layer)` for each layer in turn."""
    if isinstance(layers, Adding):
        return _through_adding(step, x_NxD, *layers)
    # In a scan the loop itself keeps XLA from undoing the recomputation; costly barriers are not
    # needed.
    step = jax.checkpoint(step, prevent_cse=False) if config.remat else step
    few = config.platform == "cpu" and config.layers <= UNROLLED_LAYERS
    unroll = config.layers if few else 1
    return jax.lax.scan(lambda x, layer: (step(x, layer), None), x_NxD, layers, unroll=unroll)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _through_adding(step, x_NxD, layers, totals):
    return _forward(step, x_NxD, layers, totals)[0]


def _forward(step, x_NxD, layers, totals):
    x, inputs = jax.lax.scan(lambda x, layer: (step(x, layer), x), x_NxD, layers)
    return x, (inputs, layers, totals)


def _backward(step, saved, of_x):
    inputs, layers, totals = saved
    count = len(inputs)

    def layer(done, state):
        of_x, totals = state
        at = count - 1 - done

        def mine(x):
            return jax.lax.dynamic_index_in_dim(x, at, keepdims=False)

        _, pull = jax.vjp(step, mine(inputs), jax.tree.map(mine, layers))
        of_x, gradient = pull(of_x)
        return of_x, jax.tree.map(lambda total, g: total.at[at].add(g), totals, gradient)

    of_x, totals = jax.lax.fori_loop(0, count, layer, (of_x, totals))
    return of_x, None, totals


_through_adding.defvjp(_forward, _backward)
