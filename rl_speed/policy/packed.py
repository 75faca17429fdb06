"""Causal attention over packed rows, in which sequences are concatenated.

Dense attention over a row of T tokens computes T scores per query. Here the cost follows the
sequences' lengths: splash on TPUs and cuDNN on GPUs since Hopper skip other sequences. Elsewhere a
query sees a window that fits the row's longest sequence: blocks of queries times blocks of keys,
with other sequences masked.
"""

import functools
import logging
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

log = logging.getLogger(__name__)

# The smallest window: below it attention is a small part of a layer's cost.
SMALLEST_WINDOW = 64


class Window(NamedTuple):
    """A static window: a query sees `size` tokens, itself included; `block` queries are computed
    together.
    """

    size: int
    block: int


def make_windows(longest: int, kernel: str = "xla") -> tuple[Window, ...]:
    """Returns windows in ascending order. The last fits `longest` tokens, and its block is a
    multiple of every other block.

    Each size is 3/2 or 4/3 of the one before. Kernels that take minutes to compile get fewer:
    "cudnn" only the doublings, and "splash" one, since it skips blocks of other sequences itself.
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
    """Computes causal attention over rows that are not packed, within `LayerSpec.window`: q [B, T,
    H, K], k, v [B, T, G, K] -> [B, T, H, K]. Heads are split over `tensor`.
    """
    if attention_kernel(config) != "splash":
        return dense_attention(q, k, v, None, config=config, window=window)
    seen = smaller(q.shape[1], window)

    def attend(q, k, v):
        return splash.splash_attention(q, k, v, None, window=seen, config=config)

    return over_tensor(attend, (2, 2, 2), 2, (q, k, v))


def smaller(tokens: int, window: int | None) -> int:
    """Returns the smaller of a number of tokens and a layer's window, if it has one."""
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
    """Computes causal attention within segments of at most `window.size` tokens.

    Args:
      q: [B, T, H, K]. k, v: [B, T, G, K]; H / G query heads share each of the G heads.
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
        """Gathers the keys that each query block may see: [B, T, ...] -> [B * count, (before + 1) *
        block, ...].
        """
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
    """Computes causal attention within sequences by cuDNN, which skips pairs of different ones.

    The kernel is private in JAX.

    Args:
      q: [B, T, H, K]. k, v: [B, T, G, K].
      lengths: i32[B, R], tokens of the sequences, which are concatenated from token 0 on; 0 after
        the last one.

    Returns: [B, T, H, K], 0 after the last sequence.

    Raises:
      NotImplementedError: on a GPU before Hopper.
      ImportError: this version of JAX does not have the kernel.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # The padding makes at least two sequences: for a single one the kernel expects no offsets.
    lengths = jnp.pad(lengths, ((0, 0), (0, 1)))
    ends = jnp.cumsum(lengths, axis=1, dtype=jnp.int32)
    held = (jnp.arange(q.shape[1]) < ends[:, -1:])[..., None, None]
    count = jnp.where(lengths > 0, lengths, -1)
    offset = jnp.pad(jnp.where(lengths > 0, ends, -1), ((0, 0), (1, 0)))

    # The kernel writes neither values nor gradients after the last sequence.
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


@functools.cache
def _warn_once(error: str) -> None:
    log.warning(
        "cuDNN cannot attend to rows one after the other here (%s): attention reads whole windows, "
        "which takes longer",
        error,
    )


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
    """Computes causal attention within segments by the splash kernel, cuDNN's, or
    `banded_attention`, whose scores the backward pass recomputes.

    Heads are split over `tensor`. Values after the last segment are undefined.

    Args:
      q, k, v, segment_ids, layer_window: as for `banded_attention`, whose result it returns.
      lengths: as for `cudnn_attention`.
      which: i32[], index of a window that fits the longest segment.
      windows: see `make_windows`.
    """

    def attend(q, k, v, segment_ids, lengths, which):
        kernel = attention_kernel(config)
        if kernel == "splash":
            seen = smaller(windows[-1].size, layer_window)
            return splash.splash_attention(q, k, v, segment_ids, window=seen, config=config)
        if kernel == "cudnn" and layer_window is None:
            try:
                return cudnn_attention(q, k, v, lengths)
            except (NotImplementedError, ImportError) as error:
                _warn_once(str(error))
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
    # The switch is outside of the differentiated function: inside, the backward pass would hold the
    # scores of every branch, with zeros for branches that were not taken.
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
