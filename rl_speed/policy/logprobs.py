"""Log-probabilities and entropies of given tokens, without ever holding
[batch, time, vocabulary].
"""

import functools

import jax
import jax.numpy as jnp

from rl_speed.policy.config import ModelConfig
from rl_speed.policy.transformer import (
    Array,
    Params,
    Vocabulary,
    Weights,
    hidden_states,
    output_head,
)

# Logits computed together by default: 2^27 float32 numbers are 512 MiB over the whole batch.
DEFAULT_LOGITS = 2**27


def logits_logprobs(
    logits: Array, targets: Array, with_entropy: bool = False, vocabulary: Vocabulary = Vocabulary()
) -> tuple[Array, Array | None]:
    """Log-softmax of float32 logits [..., V] at targets [...],
    and the entropy in nats if asked for; `vocabulary`: what of it the logits are of.
    """
    # Shifted to a maximum of zero first: the results are differences of logits, and rounding at the
    # size of the logits themselves (an entropy off by 1e-4 nats at logits around 40) would outgrow
    # what sampler and trainer may disagree by.
    logits = logits.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    logits = logits - vocabulary.max(top)
    # A masked sum rather than a gather: its gradient is a fused select where a gather's is a
    # scatter, and it stays local when the vocabulary is sharded.
    chosen = jnp.where(vocabulary.ids(logits.shape) == targets[..., None], logits, 0.0)
    chosen = vocabulary.sum(jnp.sum(chosen, axis=-1))
    weights = jnp.exp(logits)
    total = vocabulary.sum(jnp.sum(weights, axis=-1))
    normaliser, entropy = jnp.log(total), None
    if with_entropy:
        # Both sums in one pass over the logits.
        entropy = normaliser - vocabulary.sum(jnp.sum(weights * logits, axis=-1)) / total
    return chosen - normaliser, entropy


def token_logprobs(
    params: Params,
    hidden_BxTxD: Array,
    targets_BxT: Array,
    config: ModelConfig,
    temperature: float | Array = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
    weights: Weights = Weights(),
) -> tuple[Array, Array | None]:
    """Log-softmax of logits / temperature at the targets,
    the output head applied in pieces of time.

    The pieces are slices of time and not of rows, so that a batch sharded over rows stays where it
    is. In the backward pass each piece's logits are computed again.

    Args:
      params: the tree of `transformer.weights(config)`.
      hidden_BxTxD: from `transformer.hidden_states`.
      targets_BxT: i32 [B, T], in [0, V): the token that follows each position. Any valid id at
        positions to be masked.
      config: static.
      temperature: above 0; a number, or a scalar array.
      chunk: tokens (over all rows) whose logits are held at a time; None holds about 2^27 logits.
      with_entropy: whether to compute the entropy of the tempered distribution, which costs another
        pass over logits.
      weights: how the parameters are read.

    Returns:
      (logprobs f32 [B, T], entropy f32 [B, T] in nats, or None).

    Raises:
      ValueError: if temperature or chunk is a number that is not positive.
    """
    if isinstance(temperature, (int, float)) and temperature <= 0:
        raise ValueError(
            f"temperature must be above 0, got {temperature} (greedy samples have log-probs at 1)"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    rows, length, width = hidden_BxTxD.shape
    chunk = max(1, DEFAULT_LOGITS // config.vocab_size) if chunk is None else chunk
    step = min(length, max(1, chunk // max(rows, 1)))

    def piece(head, hidden, targets):
        # Tokens on one axis, as in `hidden_states`.
        seen = vocabulary.tokens(hidden.reshape(-1, width))
        logits = output_head(head, seen, config) / temperature
        told = vocabulary.tokens(targets.reshape(-1))
        found = logits_logprobs(logits, told, with_entropy, vocabulary)
        return jax.tree.map(lambda x: vocabulary.mine(x).reshape(targets.shape), found)

    name = "embed" if config.tie_embeddings else "lm_head"
    table, vocabulary = weights.head(name, params[name])
    head = {name: table}
    with jax.named_scope("token_logprobs"):
        if step >= length:
            return piece(head, hidden_BxTxD, targets_BxT)
        pieces = -(-length // step)
        pad = pieces * step - length
        split = lambda x: jnp.moveaxis(
            jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)).reshape(
                rows, pieces, step, *x.shape[2:]
            ),
            1,
            0,
        )
        recomputed = jax.checkpoint(functools.partial(piece, head), prevent_cse=False)
        _, outputs = jax.lax.scan(
            lambda _, xs: (None, recomputed(*xs)), None, (split(hidden_BxTxD), split(targets_BxT))
        )
        join = lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, pieces * step)[:, :length]
        return jax.tree.map(join, outputs)


def sequence_logprobs(
    params: Params,
    tokens: Array,
    config: ModelConfig,
    temperature: float | Array = 1.0,
    chunk: int | None = None,
    with_entropy: bool = False,
) -> tuple[Array, Array | None]:
    """Log-probs of each token of whole rows given those before it:
    `token_logprobs` behind a forward pass.

    Args:
      tokens: i32[R, W], padded on the right; what is found at padding means nothing.
      others: as `token_logprobs` takes them.

    Returns:
      (logprobs f32[R, W - 1], column t for the token at t + 1, entropy f32[R, W - 1]
      there, or None).
    """
    hidden = hidden_states(params, tokens, config)[:, :-1]
    return token_logprobs(
        params,
        hidden,
        tokens[:, 1:],
        config,
        temperature=temperature,
        chunk=chunk,
        with_entropy=with_entropy,
    )
