"""Forward and backward pass through stacked layers, with recomputation and accumulated gradients.

Layers may differ in what they compute (`ModelConfig.specs`): `steps` has a function (x, layer) -> x
for each layer of a period. A loop runs whole periods; an incomplete last period follows it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl_speed.policy.block import Array, Params
from rl_speed.policy.config import ModelConfig

# Up to this many layers are unrolled on a CPU: they compile fast, and the backward pass needs no
# copies into stacked arrays. (The TPU compiler crashes on unrolled layers that are gathered over
# fsdp and split over tensor.)
UNROLLED_LAYERS = 4

Steps = Sequence[Callable[[Array, Params], Array]]


class Adding(NamedTuple):
    """Stacked layers whose gradients are accumulated into `totals`; see `adding`."""

    weights: Params
    totals: Params


def adding(params: Params, totals: Params, config: ModelConfig) -> Params:
    """Returns `params` for `hidden_states` and `token_logprobs` whose gradients accumulate into
    `totals`: the gradient with respect to `totals` is `totals` plus the weights' gradient. No
    gradient flows to `params`, so no second gradient tree is held.

    With `config.remat` (unless it keeps products), each layer's gradient is added in place as soon
    as it is computed.

    Args:
      params: the tree of `weights(config)`.
      totals: a tree from `transformer.trainable`, float32.
    """
    in_place = {}
    if config.remat is True:
        in_place["layers"] = Adding(params["layers"], totals["layers"])
    plain = {
        name: jax.tree.map(_add_to, part, totals[name])
        for name, part in params.items()
        if name not in in_place
    }
    return {**in_place, **plain}


def _add_to(weight: Array, total: Array | None) -> Array:
    return weight if total is None else _added_to(weight, total)


@jax.custom_vjp
def _added_to(weight: Array, total: Array) -> Array:
    return weight


_added_to.defvjp(lambda weight, total: (weight, total), lambda total, g: (None, total + g))


def through_layers(
    steps: Steps, x_NxD: Array, layers: Params | Adding, config: ModelConfig
) -> Array:
    """Applies all layers in turn: `steps[i % len(steps)](x, layer i)`. Returns x, [N, D]."""
    if isinstance(layers, Adding):
        return _through_adding(tuple(steps), x_NxD, *layers)
    if config.remat:
        # In a scan the loop itself keeps XLA from undoing the recomputation; costly barriers are
        # not needed.
        kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policy = kept if config.remat == "products" else None
        steps = [jax.checkpoint(step, prevent_cse=False, policy=policy) for step in steps]
    few = config.platform == "cpu" and config.layers <= UNROLLED_LAYERS
    return _scan(steps, x_NxD, layers, unroll=few)[0]


def _scan(
    steps: Steps, x: Array, layers: Params, unroll: bool = False, keep: bool = False
) -> tuple[Array, Array | None]:
    """Returns (x after all layers, the layers' inputs [layers, ...] if `keep`, else None)."""
    size = len(steps)
    count = len(layers["wo"])
    whole = count // size * size  # layers of whole periods

    def period(x, layers, length=size):
        inputs = []
        for i in range(length):
            inputs.append(x)
            x = steps[i](x, jax.tree.map(lambda w: w[i], layers))
        return x, jnp.stack(inputs) if keep else None

    def single(x, layer):
        return steps[0](x, layer), x if keep else None

    unrolled = count // size if unroll else 1
    if size == 1:
        return jax.lax.scan(single, x, layers, unroll=unrolled)
    periods = jax.tree.map(lambda w: w[:whole].reshape(-1, size, *w.shape[1:]), layers)
    x, inputs = jax.lax.scan(period, x, periods, unroll=unrolled)
    if keep:
        inputs = inputs.reshape(whole, *x.shape)
    if whole < count:
        x, more = period(x, jax.tree.map(lambda w: w[whole:], layers), length=count - whole)
        inputs = jnp.concatenate([inputs, more]) if keep else None
    return x, inputs


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _through_adding(steps, x_NxD, layers, totals):
    return _forward(steps, x_NxD, layers, totals)[0]


def _forward(steps, x_NxD, layers, totals):
    x, inputs = _scan(steps, x_NxD, layers, keep=True)
    return x, (inputs, layers, totals)


def _backward(steps, saved, of_x):
    inputs, layers, totals = saved
    count = len(inputs)
    size = len(steps)

    def layer(at, step, of_x, totals):
        def mine(x):
            return jax.lax.dynamic_index_in_dim(x, at, keepdims=False)

        x = mine(inputs)
        weights = jax.tree.map(mine, layers)
        trained = {name: weights[name] for name in weights if totals[name] is not None}
        _, pull = jax.vjp(lambda x, some: step(x, {**weights, **some}), x, trained)
        of_x, gradient = pull(of_x)
        added = {name: totals[name].at[at].add(g) for name, g in gradient.items()}
        return of_x, {**totals, **added}

    def period(done, state):
        last = count // size - 1 - done
        for i in reversed(range(size)):
            state = layer(last if size == 1 else last * size + i, steps[i], *state)
        return state

    state = of_x, totals
    for at in reversed(range(count // size * size, count)):
        state = layer(at, steps[at % size], *state)
    of_x, totals = jax.lax.fori_loop(0, count // size, period, state)
    return of_x, None, totals


_through_adding.defvjp(_forward, _backward)
