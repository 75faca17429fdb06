"""Causal attention over packed rows, in which sequences are concatenated.

Dense attention over a row of T tokens computes T scores per query. Here the cost follows the
sequences' lengths: splash on TPUs and cuDNN on GPUs since Hopper skip other sequences. Elsewhere a
query sees a window that fits the row's longest sequence: blocks of queries times blocks of keys,
with other sequences masked.

Sequences may share a prefix, which the row holds once (`Prefix`). Then a block of queries also sees
the prefix of its first token. The kernels get every sequence with a copy of its prefix, so that
attention alone is computed for each of them.
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
    """A static window: a query sees `size` tokens of its segment, itself included, and `prefix`
    tokens of its segment's prefix; `block` queries are computed together.
    """

    size: int
    block: int
    prefix: int = 0


class Prefix(NamedTuple):
    """Prefixes that sequences of a row of T tokens share. A prefix is a segment of its own,
    directly before the first of its sequences; other sequences with the same prefix follow, or with
    a part of it from its beginning.

    Attributes:
      segment: i32[T], segment id of each token's prefix, or of the token itself if it is in a
        prefix or has none. start: i32[T], place of that prefix's first token.
      length: i32[T], tokens of the prefix that the token's sequence has.
      position: i32[T], of each token in its sequence, prefix included.
      spread: i32[U], the token at each place of the sequences one after the other, each with a copy
        of its prefix; empty for attention "xla". spread_segment: i32[U], their sequences, -1 after
        the last one. back: i32[T], one of the places of each token.
    """

    segment: Array
    start: Array
    length: Array
    position: Array
    spread: Array
    spread_segment: Array
    back: Array


def make_windows(longest: int, kernel: str = "xla", sharing: bool = False) -> tuple[Window, ...]:
    """Returns windows for sequences of up to `longest` tokens. The last one's block is a multiple
    of every other block.

    Each size is 3/2 or 4/3 of the one before. Kernels that take minutes to compile get fewer:
    "cudnn" only the doublings, as pairs of long sequences do, and "splash" one, since it skips
    blocks of other sequences itself.

    Args:
      sharing: whether sequences may share a prefix. Then there are windows for pairs of lengths of
        a prefix and of what follows it. The last fits any two, others those that add up to
        `longest`.
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
    few = kernel == "cudnn" or (sharing and doublings > 2)
    windows = windows[:-1:2] if few else windows[:-1]
    if not sharing:
        return tuple(windows)
    prefixes = [-(-longest // (8 * part)) * 8 for part in (4, 2, 1)]
    return tuple(
        window._replace(prefix=prefix)
        for less, window in zip([0, *(w.size for w in windows)], windows)
        for shorter, prefix in zip([0, *prefixes], prefixes)
        if less + shorter + 2 <= longest or (window is windows[-1] and prefix is prefixes[-1])
    )


def choose_window(windows: tuple[Window, ...], longest: Array, prefix: Array) -> Array:
    """Returns the index of the smallest window for segments of up to `longest` tokens and prefixes
    of up to `prefix` tokens, i32[].
    """
    sizes, _, prefixes = (jnp.asarray(column, jnp.int32) for column in zip(*windows))
    fits = (sizes >= longest) & (prefixes >= prefix)
    return jnp.argmin(jnp.where(fits, sizes + prefixes, 2**30)).astype(jnp.int32)


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
    prefix: Prefix | None = None,
) -> Array:
    """Computes causal attention within segments of at most `window.size` tokens, and of each
    segment to its prefix.

    Args:
      q: [B, T, H, K]. k, v: [B, T, G, K]; H / G query heads share each of the G heads.
      segment_ids: i32[B, T]; a segment's tokens are contiguous. T is a multiple of `window.block`.
      layer_window: `LayerSpec.window`.
      prefix: shared prefixes of the row (B = 1), none longer than `window.prefix`; they may be
        longer than `window.size`.

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
    segment_K = keys(segment_ids, fill=-2)[:, None, :]
    mask = queries(segment_ids)[:, :, None] == segment_K
    if prefix is not None:
        at, most = queries(prefix.position[None]), queries(prefix.length[None])[:, :, None]
        band_K = keys(prefix.position[None])
        of_prefix = queries(prefix.segment[None])[:, :, None] == segment_K
        mask |= of_prefix & (band_K[:, None] < most)
    mask &= place_K <= place_Q[:, None]
    seen = keys(k), keys(v)
    if layer_window is not None and prefix is None:
        mask &= place_K > place_Q[:, None] - layer_window
    if prefix is not None:
        # Only the prefix of a block's first token can begin before the block. Its tokens that the
        # band does not reach come first among the keys, also for queries in the prefix itself.
        start = prefix.start[::block]
        place = start[:, None] + jnp.arange(window.prefix)
        outside = place < ((jnp.arange(count) - before) * block)[:, None]

        def prefixes(x):
            x = jnp.pad(x, ((0, window.prefix),) + ((0, 0),) * (x.ndim - 1))
            return jax.vmap(lambda at: jax.lax.dynamic_slice_in_dim(x, at, window.prefix))(start)

        prefix_K = prefixes(prefix.position)
        same = queries(prefix.segment[None])[:, :, None] == prefixes(segment_ids[0])[:, None]
        same &= prefix_K[:, None] < most
        mask = jnp.concatenate([same & outside[:, None], mask], axis=2)
        seen = tuple(
            jnp.concatenate([prefixes(x[0]), band], axis=1) for x, band in zip((k, v), seen)
        )
        if layer_window is not None:
            at_K = jnp.concatenate([prefix_K, band_K], axis=1)
            mask &= at_K[:, None] > at[:, :, None] - layer_window
    implementation = attention_implementation(config, True, block, window=layer_window)
    out = jax.nn.dot_product_attention(
        queries(q), *seen, mask=mask[:, None], implementation=implementation
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
    prefix: Prefix | None = None,
) -> Array:
    """Computes causal attention within segments, and of each segment to its prefix, by the splash
    kernel, cuDNN's, or `banded_attention`, whose scores the backward pass recomputes.

    Heads are split over `tensor`. Values after the last segment are undefined.

    Args:
      q, k, v, segment_ids, layer_window, prefix: as for `banded_attention`, whose result it
        returns.
      lengths: i32[B, R], tokens of the sequences with their prefixes, as for `cudnn_attention`.
      which: i32[], index of a window that fits; see `choose_window`.
      windows: see `make_windows`.
    """

    def attend(q, k, v, segment_ids, lengths, which, prefix):
        kernel = attention_kernel(config)
        if kernel == "splash":
            seen = smaller(windows[-1].size, layer_window)

            def splash_kernel(q, k, v, segment_ids):
                return splash.splash_attention(q, k, v, segment_ids, window=seen, config=config)

            return _spread(splash_kernel, q, k, v, segment_ids, prefix)
        if kernel == "cudnn" and layer_window is None:
            try:
                return _spread(
                    lambda q, k, v, _: cudnn_attention(q, k, v, lengths),
                    q,
                    k,
                    v,
                    segment_ids,
                    prefix,
                )
            except (NotImplementedError, ImportError) as error:
                _warn_once(str(error))
        return _switched(q, k, v, segment_ids, which, prefix, windows, config, layer_window)

    arguments = (q, k, v, segment_ids, lengths, which, prefix)
    return over_tensor(attend, (2, 2, 2, None, None, None, None), 2, arguments)


def _spread(kernel, q, k, v, segment_ids, prefix):
    """Computes `kernel` on sequences that have copies of their prefixes."""
    if prefix is None:
        return kernel(q, k, v, segment_ids)
    copied = (x[:, prefix.spread] for x in (q, k, v))
    return kernel(*copied, prefix.spread_segment[None])[:, prefix.back]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7, 8))
def _switched(q, k, v, segment_ids, which, prefix, windows, config, layer_window):
    branches = _branches(segment_ids, prefix, windows, config, layer_window)
    return jax.lax.switch(which, branches, q, k, v)


def _branches(segment_ids, prefix, windows, config, layer_window):
    """Returns a function (q, k, v) -> attention for each window."""
    return [
        functools.partial(
            banded_attention,
            segment_ids=segment_ids,
            window=window,
            config=config,
            layer_window=layer_window,
            prefix=prefix,
        )
        for window in windows
    ]


def _forward(q, k, v, segment_ids, which, prefix, *settings):
    out = _switched(q, k, v, segment_ids, which, prefix, *settings)
    return out, (q, k, v, segment_ids, which, prefix)


def _backward(windows, config, layer_window, saved, out_gradient):
    # The switch is outside of the differentiated function: inside, the backward pass would hold the
    # scores of every branch, with zeros for branches that were not taken.
    *qkv, segment_ids, which, prefix = saved

    def pulled(attend):
        return lambda q, k, v, out_gradient: jax.vjp(attend, q, k, v)[1](out_gradient)

    branches = map(pulled, _branches(segment_ids, prefix, windows, config, layer_window))
    with full_precision(config):
        gradients = jax.lax.switch(which, list(branches), *qkv, out_gradient)
    return *gradients, None, None, None


_switched.defvjp(_forward, _backward)
