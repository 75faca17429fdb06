"""The update: advantages, loss, gradient over micro-batches, optimizer, in one jitted,
sharded, donated function.

Every mean in the loss is a weight computed once on the whole batch (`objectives.token_weights`);
micro-batches and shards merely add up, so neither changes the result.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_speed import objectives
from rl_speed.config import Objective
from rl_speed.mesh import ROWS, batch_sharding, replicated
from rl_speed.named import named
from rl_speed.policy import ModelConfig, sequence_logprobs
from rl_speed.sampling import Batch
from rl_speed.update.state import TrainState, state_shardings

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    """Static settings of the update.

    Attributes:
      groups: static number of groups a batch can hold. micro_batch: rows per gradient piece.
      objective: which advantage and which loss, with their numbers. It is hashed by value: nobody
        may change it any more.
      temperature: of the sampler; the trainer's log-probs are those of the same distribution.
        max_new: its limit, in tokens.
      head_chunk: tokens whose logits exist at once; None: as many as `token_logprobs` chooses.
    """

    groups: int
    micro_batch: int
    objective: Objective = Objective()
    temperature: float = 1.0
    max_new: int = 0
    head_chunk: int | None = None


def pieces(tree: Any, count: int) -> Any:
    """[R, ...] leaves -> [count, R / count, ...]; piece m holds rows m, m + count,
    ... so that each stays spread over the row shards.
    """
    return jax.tree.map(
        lambda x: jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1), tree
    )


def make_score(model: ModelConfig, mesh: Mesh, param_shardings: Any, config: UpdateConfig):
    """(params, tokens i32[R, W]) -> log-probs f32[R, W - 1],
    in pieces of `micro_batch` rows, jitted on the mesh.

    For old log-probs (recompute) and those of a reference policy.
    """

    def score(params, tokens):
        count = tokens.shape[0] // config.micro_batch
        one = lambda rows: sequence_logprobs(
            params, rows, model, config.temperature, config.head_chunk
        )[0]
        out = jax.lax.map(one, pieces(tokens, count))
        return jnp.swapaxes(out, 0, 1).reshape(tokens.shape[0], -1)

    rows = batch_sharding(mesh)
    return jax.jit(score, in_shardings=(param_shardings, rows), out_shardings=rows)


def batch_advantages(config: UpdateConfig, batch: Batch) -> Array:
    """Advantages f32[R] of the whole batch."""
    advantage = named(config.objective.advantage, objectives.ADVANTAGES)
    return advantage(batch.rewards, batch.group_ids, config.groups, jnp.sum(batch.mask, axis=1))


@functools.lru_cache(maxsize=16)
def make_advantages(mesh: Mesh, config: UpdateConfig):
    """(batch, ref_gap f32[R, W - 1] or None) -> advantages f32[R], jitted on the mesh,
    over the whole RL batch.

    `ref_gap` is log behaviour - log reference, for a KL penalty in the reward (k1, summed over
    the response).
    """

    def advantages(batch: Batch, ref_gap):
        rewards = batch.rewards
        if ref_gap is not None:
            rewards = rewards - config.objective.kl_coef * jnp.sum(
                jnp.where(batch.mask, ref_gap, 0.0), axis=1
            )
        return batch_advantages(config, batch.replace(rewards=rewards))

    rows = batch_sharding(mesh)
    return jax.jit(advantages, out_shardings=rows)


def gradients(
    params: Any,
    batch: Batch,
    advantages: Array,
    old_logprobs: Array | None,
    ref_logprobs: Array | None,
    model: ModelConfig,
    config: UpdateConfig,
    rows_sharding: NamedSharding | None = None,
):
    """(gradient f32 like params, metrics) of the loss over the whole batch,
    accumulated over micro-batches.
    """
    rows = batch.tokens.shape[0]
    count = rows // config.micro_batch
    o, constant = config.objective, None
    if o.aggregation == "token_sum_constant":
        constant = (o.aggregation_constant or float(config.max_new)) * jnp.sum(
            jnp.any(batch.mask, axis=1)
        )
    weights = objectives.token_weights(batch.mask, o.aggregation, constant)
    kl_in_loss = o.kl_coef > 0 and o.kl_in == "loss"
    policy_loss = functools.partial(
        objectives.policy_loss,
        loss=functools.partial(named(o.loss, objectives.LOSSES), **o.loss_numbers()),
        truncation=o.truncation,
        correction="recompute" if o.old_logprobs == "recompute" else "behaviour",
        kl_coef=o.kl_coef if kl_in_loss else 0.0,
        kl_kind=o.kl_kind,
        entropy_coef=o.entropy_coef,
    )

    def loss(params, piece):
        with jax.named_scope("policy"):
            logprobs, entropy = sequence_logprobs(
                params,
                piece["tokens"],
                model,
                config.temperature,
                config.head_chunk,
                with_entropy=True,
            )
        with jax.named_scope("loss"):
            return policy_loss(
                logprobs,
                piece["behaviour"],
                piece["advantages"],
                piece["mask"],
                weights=piece["weights"],
                old_logprobs=piece.get("old"),
                ref_logprobs=piece.get("ref"),
                entropy=entropy,
            )

    table = {
        "tokens": batch.tokens,
        "mask": batch.mask,
        "behaviour": batch.behaviour_logprobs,
        "advantages": advantages,
        "weights": weights,
    }
    table |= {
        name: x for name, x in (("old", old_logprobs), ("ref", ref_logprobs)) if x is not None
    }
    value_and_grad = jax.value_and_grad(loss, has_aux=True)
    if count == 1:
        (_, metrics), grads = value_and_grad(params, table)
        return grads, metrics
    table = pieces(table, count)
    if rows_sharding is not None:
        spread = NamedSharding(rows_sharding.mesh, PartitionSpec(None, ROWS))
        table = jax.lax.with_sharding_constraint(table, spread)

    def add(carry, piece):
        grads, metrics = carry
        (_, more_metrics), more = value_and_grad(params, piece)
        return (
            jax.tree.map(jnp.add, grads, more),
            objectives.merge_metrics(metrics, more_metrics),
        ), None

    shapes = jax.eval_shape(value_and_grad, params, jax.tree.map(lambda x: x[0], table))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[1], shapes[0][1]))
    return jax.lax.scan(add, zeros, table)[0]


def apply_gradients(
    state: TrainState, grads: Any, loss: Array, optimizer: optax.GradientTransformation
):
    """One optimizer step, or none where the loss or the gradient is not finite.

    Returns (state, norm, finite).
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    skipped = (~finite).astype(jnp.int32)
    return (
        TrainState(
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            step=state.step + 1 - skipped,
            skipped=state.skipped + skipped,
            skipped_in_row=(state.skipped_in_row + 1) * skipped,
        ),
        norm,
        finite,
    )


@functools.lru_cache(maxsize=16)  # another trainer of the same settings finds what is compiled
def make_update(
    model: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, config: UpdateConfig
):
    """The jitted update (state, batch, advantages, old_logprobs, ref_logprobs) -> (state, metrics);
    donates the state.

    `old_logprobs` and `ref_logprobs` are f32[R, W - 1] or None. Metrics are f32 scalars: those of
    `policy_loss`, gradient norm before clipping, update skipped or not.
    """
    shardings = state_shardings(model, optimizer, mesh)
    rows, whole = batch_sharding(mesh), replicated(mesh)

    def update(state: TrainState, batch: Batch, advantages, old_logprobs, ref_logprobs):
        grads, metrics = gradients(
            state.params, batch, advantages, old_logprobs, ref_logprobs, model, config, rows
        )
        with jax.named_scope("optimizer"):
            state, norm, finite = apply_gradients(state, grads, metrics["loss/total"], optimizer)
        metrics = objectives.summarise_metrics(metrics)
        return state, {**metrics, "grad_norm": norm, "skipped": 1.0 - finite.astype(jnp.float32)}

    return jax.jit(
        update,
        in_shardings=(shardings, rows, rows, rows, rows),
        out_shardings=(shardings, whole),
        donate_argnums=0,
    )
