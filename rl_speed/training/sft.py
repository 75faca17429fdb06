"""Supervised fine-tuning: the cold start before RL. The loss is on the solution, its end token included, only."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh

from rl_speed.mesh import batch_sharding
from rl_speed.policy import ModelConfig, hidden_states, token_logprobs

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A prompt (i32[P]) with the response to learn (i32[R], end token included)."""

    prompt: np.ndarray
    response: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


@struct.dataclass
class SFTBatch:
    """tokens i32[B, T], right-padded; mask bool[B, T], True on the tokens to learn."""

    tokens: Array
    mask: Array


def build_batch(examples: Sequence[Example], length: int) -> SFTBatch:
    """Pads examples to `length` tokens. Raises ValueError for one that is longer: cutting would hide its end."""
    tokens = np.zeros((len(examples), length), np.int32)
    mask = np.zeros((len(examples), length), np.bool_)
    for row, example in enumerate(examples):
        if len(example) > length:
            raise ValueError(f"an example of {len(example)} tokens does not fit into {length}")
        tokens[row, : len(example)] = np.concatenate([example.prompt, example.response])
        mask[row, len(example.prompt) : len(example)] = True
    return SFTBatch(tokens=tokens, mask=mask)


def keep_short(examples: Sequence[Example], max_length: int) -> tuple[list[Example], int]:
    """Examples of at most `max_length` tokens, and how many were dropped. Raises ValueError when none is left."""
    kept = [example for example in examples if len(example) <= max_length]
    if not kept:
        raise ValueError(f"all {len(examples)} examples are longer than max_length = {max_length} tokens")
    return kept, len(examples) - len(kept)


def shuffled_epochs(examples: Sequence[Example], batch_size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches; each epoch in a new order. What an epoch has too few of for a batch, the next one fills up."""
    waiting: list[Example] = []
    epoch = 0
    while True:
        while len(waiting) < batch_size:
            order = np.random.default_rng([seed, epoch]).permutation(len(examples))
            waiting.extend(examples[row] for row in order)
            epoch += 1
        yield waiting[:batch_size]
        waiting = waiting[batch_size:]


def loss_sum(params: Any, batch: SFTBatch, model: ModelConfig) -> Array:
    """Sum of -log p over the tokens to learn, in nats, f32 scalar."""
    hidden_BxTxD = hidden_states(params, batch.tokens[:, :-1], model)
    logprobs_BxT, _ = token_logprobs(params, hidden_BxTxD, batch.tokens[:, 1:], model)
    return -jnp.sum(jnp.where(batch.mask[:, 1:], logprobs_BxT, 0.0))


def make_update(model: ModelConfig, optimizer: optax.GradientTransformation,
                micro_batches: int = 1) -> Callable[[Any, Any, SFTBatch], tuple[Any, Any, dict[str, Array]]]:
    """A jitted (params, opt_state, batch) -> (params, opt_state, metrics); the first two are donated.

    Args:
      micro_batches: pieces of equal size whose gradients are added up before the update. The loss is the mean over the
        tokens of the whole batch, so it does not depend on their number.
    """
    def update(params, opt_state, batch):
        tokens = jnp.maximum(jnp.sum(batch.mask[:, 1:]), 1)

        def add_piece(total, piece):
            loss, gradients = jax.value_and_grad(loss_sum)(params, piece, model)
            return jax.tree.map(jnp.add, total, (loss, gradients)), None

        rows = batch.tokens.shape[0]
        if rows % micro_batches:
            raise ValueError(f"a batch of {rows} rows cannot be split into {micro_batches} micro-batches of equal size")
        # Row r goes to piece r % micro_batches, so that each piece stays spread over the devices as the batch is.
        pieces = jax.tree.map(lambda x: x.reshape(rows // micro_batches, micro_batches, *x.shape[1:]).swapaxes(0, 1), batch)
        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (loss, gradients), _ = jax.lax.scan(add_piece, zero, pieces)
        gradients = jax.tree.map(lambda g: g / tokens, gradients)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        metrics = {"loss": loss / tokens, "grad_norm": optax.global_norm(gradients), "tokens": tokens}
        return optax.apply_updates(params, updates), opt_state, metrics

    return jax.jit(update, donate_argnums=(0, 1))


def make_evaluate(model: ModelConfig, mesh: Mesh | None = None) -> Callable[[Any, Sequence[SFTBatch]], float]:
    """(params, batches) -> mean -log p per token to learn, in nats, over all batches together."""
    piece = jax.jit(lambda params, batch: (loss_sum(params, batch, model), jnp.sum(batch.mask[:, 1:])))

    def evaluate(params, batches):
        sums = [piece(params, _place(batch, mesh)) for batch in batches]
        return float(sum(loss for loss, _ in sums)) / max(int(sum(count for _, count in sums)), 1)

    return evaluate


@dataclasses.dataclass(frozen=True)
class SFTConfig:
    """Settings of a supervised run.

    Attributes:
      steps: updates.
      micro_batches: gradient pieces per update.
      eval_every: updates between evaluations; 0 evaluates only at the end.
    """

    steps: int
    micro_batches: int = 1
    eval_every: int = 0


def train(params: Any, model: ModelConfig, optimizer: optax.GradientTransformation, batches: Iterator[SFTBatch],
          eval_batches: Sequence[SFTBatch], config: SFTConfig, report: Callable[[dict[str, float]], None],
          mesh: Mesh | None = None) -> Any:
    """Runs `config.steps` updates and returns the new parameters (`params` is donated: do not use it afterwards).

    Args:
      batches: of one shape, or of few: each shape compiles once.
      report: called once an update with {"step", "loss", "grad_norm", "tokens"} and, after an evaluation, "eval_loss".
      mesh: rows are split over its ("data", "fsdp"); None is one device.

    Raises:
      FloatingPointError: the loss is not finite (a learning rate too high, or broken weights); nothing was saved.
    """
    update, evaluate = make_update(model, optimizer, config.micro_batches), make_evaluate(model, mesh)
    opt_state = jax.jit(optimizer.init)(params)
    for step in range(1, config.steps + 1):
        params, opt_state, metrics = update(params, opt_state, _place(next(batches), mesh))
        metrics = {"step": step, **{name: float(value) for name, value in metrics.items()}}
        if not np.isfinite(metrics["loss"] + metrics["grad_norm"]):
            raise FloatingPointError(f"SFT step {step}: loss {metrics['loss']}, gradient norm {metrics['grad_norm']}; lower"
                                     " the learning rate or check the starting weights")
        if eval_batches and (step == config.steps or (config.eval_every and step % config.eval_every == 0)):
            metrics["eval_loss"] = evaluate(params, eval_batches)
        report(metrics)
    return params


def _place(batch: SFTBatch, mesh: Mesh | None) -> SFTBatch:
    return batch if mesh is None else jax.device_put(batch, batch_sharding(mesh))
