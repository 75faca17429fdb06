"""Attention over a stream of concatenated sequences, at the cost of the sequences.

Dense attention over a row of T tokens computes T keys per query, whatever the row holds. Kernels
skip other sequences: splash on TPUs, cuDNN on GPUs since Hopper. Elsewhere a query sees one window,
which fits the longest sequence of its stream: blocks of queries times blocks of keys, with a mask
for other sequences.
"""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rl_speed.mesh import over_tensor
from rl_speed.policy import splash
from rl_speed.policy.block import full_precision
from rl_speed.policy.config import ModelConfig
from rl_speed.policy.transformer import (
    Array,
    attention_implementation,
    attention_kernel,
    dense_attention,
)

# The smallest window with its own program: below it attention is a small part of a layer.
SMALLEST_WINDOW = 64


class Window(NamedTuple):
    """Static: `size` tokens that a query sees, with its own; `block` queries computed together."""

    size: int
    block: int


def make_windows(longest: int, kernel: str = "xla") -> tuple[Window, ...]:
    """Ascending windows. The last holds `longest` tokens, and its block is a multiple of every
    other.

    Each is 3/2 or 4/3 of the one before. Kernels that compile for minutes have fewer: "cudnn" only
    the doublings, and "splash" one, since it skips blocks of other sequences itself.
    """
    if kernel == "splash":
        block = splash.block_of(longest)
        return (Window(-(-longest // block) * block, block),)
    doublings = max(0, (longest // SMALLEST_WINDOW).bit_length() - 1)
    unit = -(-longest // (8 << doublings)) * 8
    windows = []
    for size in (unit << i for i in range(doublings + 1)):
        # Small blocks waste little; large blocks multiply faster.
        block = size // 2 if size < 8 * SMALLEST_WINDOW else size // 4
        windows += [Window(size, block), Window(size * 3 // 2, block)]
    return tuple(windows[:-1:2] if kernel == "cudnn" else windows[:-1])


def causal_attention(
    q: Array, k: Array, v: Array, config: ModelConfig, window: int | None = None
) -> Array:
    """Causal attention over rows that are not packed: q [B, T, H, K], k, v [B, T, G, K] -> [B, T,
    H, K], within `LayerSpec.window`. Heads are split over `tensor`.
    """
    if attention_kernel(config) != "splash":
        return dense_attention(q, k, v, None, config=config, window=window)
    seen = smaller(q.shape[1], window)

    def attend(q, k, v):
        return splash.splash_attention(q, k, v, None, window=seen, config=config)

    return over_tensor(attend, (2, 2, 2), 2, (q, k, v))


def smaller(tokens: int, window: int | None) -> int:
    """The smaller of the tokens there are and the window of a layer, if it has one."""
    return tokens if window is None else min(tokens, window)


def banded_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    window: Window,
    config: ModelConfig,
    layer_window: int | None = None,
) -> Array:
    """Causal attention within segments of at most `window.size` tokens.

    Args:
      q: [B, T, H, K]. k, v: [B, T, N, K]; H / N query heads share each of the N heads.
      segment_ids: i32[B, T]; a segment's tokens are contiguous. T is a multiple of `window.block`.
      layer_window: `LayerSpec.window`.

    Returns: [B, T, H, K].
    """
    rows, length, heads, size = q.shape
    block = window.block
    count = length // block
    # A query block sees its own block and those that begin less than one window before its end.
    before = -(-(smaller(window.size, layer_window) - 1) // block)

    def keys(x, fill=0):
        """[B, T, ...] -> [B * count, (before + 1) * block, ...]: the keys each block may see."""
        x = jnp.pad(
            x, ((0, 0), (before * block, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=fill
        )
        x = x.reshape(rows, count + before, block, *x.shape[2:])
        seen = jnp.concatenate([x[:, i : i + count] for i in range(before + 1)], axis=2)
        return seen.reshape(rows * count, (before + 1) * block, *x.shape[3:])

    def queries(x):
        return x.reshape(rows * count, block, *x.shape[2:])

    place_Q = jnp.arange(block) + before * block
    place_K = jnp.arange((before + 1) * block)
    same = queries(segment_ids)[:, :, None] == keys(segment_ids, fill=-2)[:, None, :]
    mask = (same & (place_K <= place_Q[:, None]))[:, None]
    if layer_window is not None:
        mask &= place_K > place_Q[:, None] - layer_window
    implementation = attention_implementation(config, True, block, window=layer_window)
    out = jax.nn.dot_product_attention(
        queries(q), keys(k), keys(v), mask=mask, implementation=implementation
    )
    return out.reshape(rows, length, heads, size)


def cudnn_attention(q: Array, k: Array, v: Array, lengths: Array) -> Array:
    """Causal attention within sequences by cuDNN, which computes no other pairs.

    JAX has this kernel, but gives it no public name.

    Args:
      q: [B, T, H, K]. k, v: [B, T, N, K]. lengths: i32[B, R], tokens of the sequences that lie
        behind one another from token 0 on; 0 behind the last one.

    Returns: [B, T, H, K], 0 behind the last sequence.

    Raises:
      NotImplementedError: on a GPU before Hopper. ImportError: not in this JAX.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # Of one sequence alone the kernel would not expect offsets.
    lengths = jnp.pad(lengths, ((0, 0), (0, 1)))
    ends = jnp.cumsum(lengths, axis=1, dtype=jnp.int32)
    held = (jnp.arange(q.shape[1]) < ends[:, -1:])[..., None, None]
    count = jnp.where(lengths > 0, lengths, -1)
    offset = jnp.pad(jnp.where(lengths > 0, ends, -1), ((0, 0), (1, 0)))

    # The kernel writes nothing behind the last sequence, neither values nor gradients.
    def within(x):
        return jnp.where(held, x, 0)

    out = cudnn.dot_product_attention(
        within(q),
        within(k),
        within(v),
        q_seqlen=count,
        kv_seqlen=count,
        q_offsets=offset,
        kv_offsets=offset,
        scale=q.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
    )
    return within(out)


def stream_attention(
    q: Array,
    k: Array,
    v: Array,
    segment_ids: Array,
    lengths: Array,
    which: Array,
    windows: tuple[Window, ...],
    config: ModelConfig,
    layer_window: int | None = None,
) -> Array:
    """Causal attention within segments: by the splash kernel, cuDNN's, or `banded_attention`, whose
    scores the backward pass recomputes.

    Args and result as there; `windows[which]`, i32[], fits the longest segment, and `lengths` is
    that of `cudnn_attention`. Undefined behind the last segment. Heads are split over `tensor`.
    """

    def attend(q, k, v, segment_ids, lengths, which):
        kernel = attention_kernel(config)
        if kernel == "splash":
            seen = smaller(windows[-1].size, layer_window)
            return splash.splash_attention(q, k, v, segment_ids, window=seen, config=config)
        if kernel == "cudnn" and layer_window is None:
            # A GPU before Hopper, or a JAX without the kernel.
            with contextlib.suppress(NotImplementedError, ImportError):
                return cudnn_attention(q, k, v, lengths)
        return _switched(q, k, v, segment_ids, which, windows, config, layer_window)

    arguments = (q, k, v, segment_ids, lengths, which)
    return over_tensor(attend, (2, 2, 2, None, None, None), 2, arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _switched(q, k, v, segment_ids, which, windows, config, layer_window):
    branches = [
        functools.partial(banded_attention, window=window, config=config, layer_window=layer_window)
        for window in windows
    ]
    return jax.lax.switch(which, branches, q, k, v, segment_ids)


def _forward(q, k, v, segment_ids, which, *settings):
    out = _switched(q, k, v, segment_ids, which, *settings)
    return out, (q, k, v, segment_ids, which)


def _backward(windows, config, layer_window, saved, out_gradient):
    # The switch is outside of the differentiated function: inside, the backward pass would hold
    # scores of every branch, with zeros for those not taken.
    *qkv, segment_ids, which = saved

    def branch(window):
        def gradients(q, k, v, out_gradient):
            def attend(q, k, v):
                return banded_attention(
                    q,
                    k,
                    v,
                    segment_ids=segment_ids,
                    window=window,
                    config=config,
                    layer_window=layer_window,
                )

            return jax.vjp(attend, q, k, v)[1](out_gradient)

        return gradients

    with full_precision(config):
        gradients = jax.lax.switch(
            which, [branch(window) for window in windows], *qkv, out_gradient
        )
    return *gradients, None, None


_switched.defvjp(_forward, _backward)
