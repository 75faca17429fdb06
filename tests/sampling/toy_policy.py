"""A policy whose every logit can be computed by hand:
a table indexed by an integer hash of all tokens before it.
"""

import functools

import jax.numpy as jnp
import numpy as np

from rl_speed.sampling import Decoder

VOCAB = 11
STATES = 97
END = 0


@functools.lru_cache
def table() -> np.ndarray:
    logits = np.random.default_rng(0).normal(size=(STATES, VOCAB)).astype(np.float32) * 2
    logits[:, END] -= 0.5
    return logits


def state_of(tokens) -> int:
    """The hash of a sequence: position-weighted sum, so that order, cut and length all matter."""
    return int(sum(int(t + 1) * (i + 3) for i, t in enumerate(tokens)) % STATES)


def _prefill(params, tokens, lengths):
    return {"tokens": tokens}, jnp.zeros((tokens.shape[0], 1)), jnp.zeros((tokens.shape[0], VOCAB))


def _init_cache(slots, max_new):
    # Filled with rubbish: what an earlier tenant left must not matter.
    return {"tokens": jnp.full((slots, max_new), 7, jnp.int32)}


def _decode(params, context_kv, cache, token, context_index, context_length, suffix_length, active):
    slots, max_new = cache["tokens"].shape
    rows = jnp.arange(slots)
    fed = cache["tokens"].at[rows, jnp.minimum(suffix_length, max_new - 1)].set(token)
    context = context_kv["tokens"][context_index]
    at = jnp.arange(context.shape[1])
    total = jnp.sum(jnp.where(at < context_length[:, None], (context + 1) * (at + 3), 0), axis=1)
    at = jnp.arange(max_new)
    total += jnp.sum(
        jnp.where(at <= suffix_length[:, None], (fed + 1) * (context_length[:, None] + at + 3), 0),
        axis=1,
    )
    return params["table"][total % STATES], {"tokens": fed}


DECODER = Decoder(
    prefill=_prefill,
    init_cache=_init_cache,
    decode=_decode,
    prepare=lambda p: {"table": p["table"]},
)


def params():
    return {"table": jnp.asarray(table())}
