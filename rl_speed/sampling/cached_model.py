"""Builds a `Decoder` from a model that has its own cache, as most JAX language models do."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rl_speed.sampling.types import Array, Decoder


def decoder_from_cached_model(
    apply: Callable[..., tuple[Array, Any]],
    empty_cache: Callable[[int, int], Any],
    set_index: Callable[[Any, Array], Any],
    context_length: int,
    prepare: Callable[[Any], Any] = lambda params: params,
) -> Decoder:
    """Builds a `Decoder` for a model with one contiguous cache per row: context, then new tokens.

    When a row gets a new request, its context is copied to the front of the row's cache; other
    steps copy nothing. Such a model writes all rows of a batch at one index, so decoding maps it
    over rows as batches of one. Build the decoder once: a new one recompiles every sampler.

    Args:
      apply: (params, tokens i32[B, N], positions i32[B, N], cache, mask bool[B, N, S]) -> (logits
        [B, N, V], cache). It writes keys and values of the N tokens from the cache's index on, and
        attends by the mask over all S positions of the cache.
      empty_cache: (rows, positions) -> cache, a pytree. Keys and values are leaves [rows,
        positions, ...]. `set_index` sets the leaves with fewer than two axes; they have rows on
        axis 0.
      set_index: (cache, index i32[]) -> cache that writes its next token at `index` in every row.
      context_length: capacity of contexts in tokens, as in the samplers' tables.
      prepare: see `Decoder.prepare`.
    """

    def prefill(params, tokens_CxL, lengths):
        del lengths  # positions after a context's end are never attended to
        rows, places = tokens_CxL.shape
        positions = jnp.broadcast_to(jnp.arange(places), (rows, places))
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((places, places), bool)), (rows, places, places))
        cache = set_index(empty_cache(rows, places), jnp.int32(0))
        return apply(params, tokens_CxL, positions, cache, mask)[1], None, None

    def init_cache(slots, max_new):
        return empty_cache(slots, context_length + max_new)

    def decode(params, context_kv, cache, token, context, context_length_S, suffix_length, active):
        fresh = active & (suffix_length == 0)
        place = context_length_S + suffix_length

        def seat(cache):
            def put(old, pool):
                if old.ndim < 2:
                    return old
                new = fresh.reshape(-1, *[1] * (old.ndim - 1))
                if jnp.issubdtype(old.dtype, jnp.inexact):
                    # Masked places weigh 0, and 0 x NaN of an earlier request would be NaN.
                    old = jnp.where(new & ~jnp.isfinite(old), 0, old)
                front = slice(None), slice(pool.shape[1])
                return old.at[front].set(
                    jnp.where(new, pool[context].astype(old.dtype), old[front])
                )

            return jax.tree.map(put, cache, context_kv)

        cache = jax.lax.cond(fresh.any(), seat, lambda cache: cache, cache)

        def row(cache, token, place):
            cache = set_index(jax.tree.map(lambda x: x[None], cache), place)
            places = max(x.shape[1] for x in jax.tree.leaves(cache) if x.ndim > 1)
            mask = (jnp.arange(places) <= place)[None, None]
            logits, cache = apply(params, token[None, None], place[None, None], cache, mask)
            return logits[0, 0], jax.tree.map(lambda x: x[0], cache)

        return jax.vmap(row)(cache, token, place)

    return Decoder(prefill, init_cache, decode, prepare)
