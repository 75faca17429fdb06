"""The optimizer: clipping of the global gradient norm, then AdamW or another by name, with warm-up
and weight decay on matrices only.

An optimizer of yours is a function (settings, schedule, decays) -> optax transformation: the
section `config.optimizer`, optimizer steps -> learning rate, and a tree of bools for the weights
that decay. Clipping is done before it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rl_speed.config import Optimizer
from rl_speed.named import named
from rl_speed.policy.block import EXPERT_MATRICES
from rl_speed.policy.transformer import MATRIX_INPUTS

# Biases stored per head have two or more axes, but are not matrices.
_BIASES = frozenset({"bq", "bk", "bv"})
# Tokens that are not in a batch have no gradient, so decay would only shrink rare tokens.
_LOOKUPS = frozenset({"embed"})


class OnHost(optax.GradientTransformationExtraArgs):
    """An optimizer whose moments stay in the host's memory between updates."""


def learning_rate_schedule(config: Optimizer, total_steps: int, unit: int = 1) -> optax.Schedule:
    """Returns a function from the optimizer steps made (i32 scalar) to the learning rate of the
    next one (f32 scalar).

    Step k (from 1) of the warm-up has k / warmup_steps of the peak rate.

    Args:
      total_steps: steps of the run, with warm-up. unit: optimizer steps that count as one step and
        share one rate.
    """
    if unit > 1:
        of_step = learning_rate_schedule(config, total_steps)
        return lambda count: of_step(count // unit)
    left = total_steps - config.warmup_steps
    final = config.final_rate
    after = {
        "constant": lambda: optax.constant_schedule(config.learning_rate),
        "linear": lambda: optax.linear_schedule(
            config.learning_rate, final * config.learning_rate, left
        ),
        "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, left, final),
    }[config.schedule]()
    if not config.warmup_steps:
        return after
    # Starts at 1/warmup_steps of the peak: a rate of 0 would waste the first RL step.
    warmup = optax.linear_schedule(
        config.learning_rate / config.warmup_steps,
        config.learning_rate,
        max(config.warmup_steps - 1, 1),
    )
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def decay_mask(params: Any) -> Any:
    """Returns a pytree of bools like `params` (arrays or abstract arrays): which weights decay.

    Matrices decay: attention and MLP projections and the separate output head. Norm scales, biases
    and the embedding table do not.
    """

    def decays(path, leaf) -> bool:
        names = [str(getattr(key, "key", key)) for key in path]
        rank = leaf.ndim - ("layers" in names[:-1])
        return rank >= 2 and names[-1] not in _BIASES | _LOOKUPS

    return jax.tree_util.tree_map_with_path(decays, params)


def _adamw(config: Optimizer, rate: optax.Schedule, decays: Any) -> optax.GradientTransformation:
    return optax.adamw(
        rate,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decays,
        mu_dtype=config.moment_dtype,
    )


def _clipped(path: Any, update: jax.Array) -> jax.Array:
    """Scales an update down to a root mean square of 1, each layer and expert for itself."""
    names = [str(getattr(key, "key", key)) for key in path]
    stacked = 2 if names[-1] in EXPERT_MATRICES else int("layers" in names[:-1])
    mean = jnp.mean(jnp.square(update), axis=tuple(range(stacked, update.ndim)), keepdims=True)
    return update / jnp.maximum(1.0, jnp.sqrt(mean))


def _adafactor(
    config: Optimizer, rate: optax.Schedule, decays: Any
) -> optax.GradientTransformation:
    """Adafactor (Shazeer and Stern, arXiv 1804.04235) with the learning rate as it stands: not
    relative to the weights, and without a first moment.
    """
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.stateless(
            lambda updates, params: jax.tree_util.tree_map_with_path(_clipped, updates)
        ),
        optax.add_decayed_weights(config.weight_decay, decays),
        optax.scale_by_learning_rate(rate),
    )


def _muon(config: Optimizer, rate: optax.Schedule, decays: Any) -> optax.GradientTransformation:
    """Muon (Jordan et al., 2024) on the matrices of the layers, each layer and expert for itself;
    routers have AdamW. Its updates have the root mean square of AdamW's, 0.2 (Liu et al., arXiv
    2502.16982), so that rates suit both.
    """

    def dimensions(path, weight):
        names = [str(getattr(key, "key", key)) for key in path]
        if names[-1] in EXPERT_MATRICES:
            return optax.contrib.MuonDimensionNumbers((2,), (3,))
        if "layers" not in names or names[-1] not in MATRIX_INPUTS:
            return None
        inputs = MATRIX_INPUTS[names[-1]]
        axes = tuple(range(1, weight.ndim))
        return optax.contrib.MuonDimensionNumbers(axes[:inputs], axes[inputs:])

    step = optax.contrib.muon(
        1.0,
        eps=config.eps,
        weight_decay=0.0,
        mu_dtype=config.moment_dtype,
        adam_b1=config.b1,
        adam_b2=config.b2,
        # A function, because optax also asks for a tree that stands for all weights.
        muon_weight_dimension_numbers=functools.partial(
            jax.tree_util.tree_map_with_path, dimensions
        ),
        consistent_rms=0.2,
    )
    # muon's own decay leaves out the weights that AdamW trains, such as the head.
    decay = optax.add_decayed_weights(-config.weight_decay, decays)
    return optax.chain(step, decay, optax.scale_by_schedule(rate))


OPTIMIZERS = {"adamw": _adamw, "adafactor": _adafactor, "muon": _muon}


def make_optimizer(
    config: Optimizer, params: Any, total_steps: int = 0, unit: int = 1
) -> optax.GradientTransformation:
    """Makes the optax transformation for the weights `params` (abstract arrays are enough).

    Equal settings and trees give the same object, so that compiled functions are reused.

    Args:
      total_steps: steps of the run, for the schedules "linear" and "cosine". unit: optimizer steps
        per step; above 1 if the schedule counts RL steps.
    """
    leaves, tree = jax.tree.flatten(decay_mask(params))
    steps = 0 if config.schedule == "constant" else total_steps
    return _make_optimizer(dataclasses.replace(config), steps, unit, tuple(leaves), tree)


@functools.lru_cache(maxsize=16)
def _make_optimizer(
    config: Optimizer, total_steps: int, unit: int, decays: tuple[bool, ...], tree: Any
):
    rate = learning_rate_schedule(config, total_steps, unit)
    make = named(config.kind, OPTIMIZERS)
    made = make(config, rate, jax.tree.unflatten(tree, decays))
    norm = config.max_grad_norm
    # With and without, the state has the same form, so that a run may go on with another norm.
    made = optax.chain(optax.clip_by_global_norm(norm) if norm else optax.identity(), made)
    return OnHost(*made) if config.moments_on_host else made
