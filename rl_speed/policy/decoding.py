"""The policy's interface for the sampler: prefill of contexts and one decode step, both with
unrolled layers.

Decoding reads an unstacked, cast copy of the layers, made once per call: a scan over stacked
weights would slice them anew for every token. Shape letters as in `transformer`, and C contexts, L
context tokens, S slots, M cache positions.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl_speed.policy.attention import KV, Attend, Cache, DecodeAttention
from rl_speed.policy.config import ModelConfig
from rl_speed.policy.packed import causal_attention
from rl_speed.policy.transformer import (
    full_precision,
    output_head,
    rms_norm,
    rope_angles,
    rotate,
    weights,
)
from rl_speed.sampling.types import Array, Decoder


class DecodeParams(NamedTuple):
    """Weights in decode layout: a list of layers with matrices for `times`, projections fused or
    not, and the embedding, final norm and head.
    """

    embed: Array  # [V, D]
    layers: list[dict[str, Any]]
    final_norm: Array
    head: dict[str, Array]


def prepare(params: Any, config: ModelConfig, fuse: bool = True) -> DecodeParams:
    """Unstack, cast to the compute dtype, and fuse q/k/v and gate/up into one matrix each.

    Weights split over `tensor` are not fused. Splitting a fused product would need collective
    permutations between devices, but shards leave the decode loop at different times.
    """
    dtype = jnp.dtype(config.dtype)

    def flat(x):
        return x.reshape(x.shape[0], -1)

    # [out, in] on CPUs: XLA then gives a row the same result among many rows and among 16 (at width
    # 256, not at 128). The barrier keeps XLA from undoing the transposition.
    cpu = config.platform == "cpu"

    def turn(x):
        return x.T if cpu else x

    def fixed(x):
        return jax.lax.optimization_barrier(x.T) if cpu else x

    def join(parts):
        return jnp.concatenate(parts, axis=0 if cpu else 1)

    def layer(i: int) -> dict[str, Any]:
        w = {name: value[i] for name, value in params["layers"].items()}
        out = {
            "attn_norm": w["attn_norm"],
            "mlp_norm": w["mlp_norm"],
            "wo": fixed(w["wo"].reshape(-1, config.width).astype(dtype)),
            "w_down": fixed(w["w_down"].astype(dtype)),
        }
        qkv = [turn(flat(w[n]).astype(dtype)) for n in ("wq", "wk", "wv")]
        up = [turn(w[n].astype(dtype)) for n in ("w_gate", "w_up")]
        out |= {"qkv": [join(qkv)], "up": [join(up)]} if fuse else {"qkv": qkv, "up": up}
        if config.qkv_bias:
            bias = [w[n].reshape(-1).astype(dtype) for n in ("bq", "bk", "bv")]
            out["qkv_bias"] = [jnp.concatenate(bias)] if fuse else bias
        if config.qk_norm:
            norms = [w["q_norm"], w["k_norm"]]
            heads = np.repeat([0, 1], [config.heads, config.kv_heads])
            out["qk_norm"] = [jnp.stack(norms)[heads]] if fuse else norms
        return out

    head = {
        name: params[name].astype(dtype)
        for name in (("embed",) if config.tie_embeddings else ("lm_head",))
    }
    return DecodeParams(
        params["embed"].astype(dtype),
        [layer(i) for i in range(config.layers)],
        params["final_norm"],
        head,
    )


def narrow(params: Any, config: ModelConfig) -> Any:
    """Weights in the compute dtype, except norms."""
    dtype = jnp.dtype(config.dtype)

    def cast(x, weight):
        return x if "norm" in weight.logical_axes else x.astype(dtype)

    return jax.tree.map(cast, params, weights(config))


def times(x: Array, weight: Array, config: ModelConfig) -> Array:
    """x [..., in] times a matrix of `DecodeParams`: [out, in] on CPUs, else [in, out]."""
    if config.platform == "cpu":
        return x @ weight.T
    # Without a barrier the TPU compiler recomputes x (a norm, for example) for each part of the
    # weights: by its estimate a quarter of the product's time.
    return (jax.lax.optimization_barrier(x) if config.platform == "tpu" else x) @ weight


def project(layer: dict[str, Any], x: Array, rope: tuple[Array, Array], config: ModelConfig):
    """Rotated queries [..., H, K], rotated keys [..., G, K] and values [..., G, K] of inputs [...,
    D], which are normed first.
    """
    normed = rms_norm(x, layer["attn_norm"], config.norm_eps)
    parts = [times(normed, w, config) for w in layer["qkv"]]
    if config.qkv_bias:
        parts = [part + bias for part, bias in zip(parts, layer["qkv_bias"])]
    parts = [part.reshape(*x.shape[:-1], -1, config.head_dim) for part in parts]

    def turn(parts: list[Array]) -> list[Array]:
        """Queries and keys: normed if this policy does so, then rotated."""
        if config.qk_norm:
            parts = [
                rms_norm(part, scale, config.norm_eps)
                for part, scale in zip(parts, layer["qk_norm"])
            ]
        return [rotate(part, *rope, config) for part in parts]

    if len(parts) == 3:
        q, k, v = parts
        q, k = turn([q, k])
        return q, k, v
    (heads,) = parts
    (turned,) = turn([heads[..., : config.heads + config.kv_heads, :]])
    return (
        turned[..., : config.heads, :],
        turned[..., config.heads :, :],
        heads[..., config.heads + config.kv_heads :, :],
    )


def feed_forward(layer: dict[str, Any], x: Array, config: ModelConfig) -> Array:
    """SwiGLU, without the residual."""
    normed = rms_norm(x, layer["mlp_norm"], config.norm_eps)
    parts = [times(normed, w, config) for w in layer["up"]]
    gate, up = (
        parts
        if len(parts) == 2
        else (parts[0][..., : config.mlp_width], parts[0][..., config.mlp_width :])
    )
    return times(jax.nn.silu(gate) * up, layer["w_down"], config)


def prefill(
    params: DecodeParams,
    tokens_CxL: Array,
    lengths_C: Array,
    config: ModelConfig,
    attention: DecodeAttention,
):
    """KV of every context token, and the hidden state and logits at each context's last token.

    Returns (list of KV with C rows and L positions, f[C, D], f32[C, V]). Unused outputs are not
    computed.
    """
    contexts, length = tokens_CxL.shape
    with full_precision(config):
        rope = rope_angles(jnp.arange(length, dtype=jnp.int32)[None], config)
        x_CxLxD = params.embed[tokens_CxL]
        pool = []
        for layer in params.layers:
            q, k, v = project(layer, x_CxLxD, rope, config)
            pool.append(attention.to_kv_layout(k, v, config))
            out = causal_attention(q, k, v, config)
            x_CxLxD = x_CxLxD + times(out.reshape(contexts, length, -1), layer["wo"], config)
            x_CxLxD = x_CxLxD + feed_forward(layer, x_CxLxD, config)
        last_CxD = jnp.take_along_axis(x_CxLxD, (lengths_C - 1)[:, None, None], axis=1)[:, 0]
        last_CxD = rms_norm(last_CxD, params.final_norm, config.norm_eps)
    return pool, last_CxD, output_head(params.head, last_CxD, config)


def init_cache(
    slots: int, max_new: int, config: ModelConfig, attention: DecodeAttention
) -> list[Cache]:
    """An empty cache of `max_new` positions per row, for each layer."""
    return [attention.empty(slots, max_new, config) for _ in range(config.layers)]


def decode(
    params: DecodeParams,
    context_kv: list[KV],
    cache: list[Cache],
    token_S: Array,
    context_index_S: Array,
    context_length_S: Array,
    suffix_length_S: Array,
    active_S: Array,
    config: ModelConfig,
    attention: DecodeAttention,
):
    """One token per row; see `rl_speed.sampling.Decoder`. Returns (logits f32[S, V], cache)."""
    contexts = len(context_kv[0].v)
    length = context_kv[0].positions
    room = sum(part.positions for part in cache[0])
    at_S = jnp.minimum(suffix_length_S, room - 1)
    with full_precision(config):
        attend = Attend(
            attention,
            config,
            context_index_S,
            context_length_S=context_length_S,
            at_S=at_S,
            active_S=active_S,
            contexts=contexts,
            length=length,
            room=room,
        )
        # Once per step: XLA would recompute sines for every layer and head.
        rope = jax.lax.optimization_barrier(rope_angles(context_length_S + suffix_length_S, config))
        x_SxD = params.embed[token_S]
        updated = []
        for layer, context, rows in zip(params.layers, context_kv, cache):
            q, k, v = project(layer, x_SxD, rope, config)
            out, rows = attend(q, k, v, context, rows)
            updated.append(rows)
            x_SxD = x_SxD + times(out, layer["wo"], config)
            x_SxD = x_SxD + feed_forward(layer, x_SxD, config)
        x_SxD = rms_norm(x_SxD, params.final_norm, config.norm_eps)
    return output_head(params.head, x_SxD, config), updated


@functools.lru_cache(maxsize=16)
def decoder(
    config: ModelConfig, fuse: bool = True, attention: DecodeAttention = DecodeAttention()
) -> Decoder:
    """The sampler's interface to this policy. One object per settings, so jit sees one static
    argument.

    Args:
      config: of the policy. fuse: False for weights split over mesh axis `tensor`; see `prepare`.
      attention: how decoding reads keys and values, and their dtype.
    """

    def bind(function, **more):
        return functools.partial(function, config=config, **more)

    return Decoder(
        prefill=bind(prefill, attention=attention),
        init_cache=bind(init_cache, attention=attention),
        decode=bind(decode, attention=attention),
        prepare=bind(prepare, fuse=fuse),
        narrow=bind(narrow),
    )
