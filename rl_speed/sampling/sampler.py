"""The compiled sampler: contexts are prefilled once, and slots are refilled inside the decode loop.

Each iteration of a `lax.while_loop` decodes one token in every slot, writes it to the row of the
slot's request, and gives each slot whose request ended the next request of the table. So the batch
does not wait for its longest sample. The numbers of requests and contexts in use are dynamic.

A request first feeds the last token of its context again. So samples that start at different places
of one cached response need only the KV of this context.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rl_speed.sampling.contract import (
    call_decode,
    call_init_cache,
    call_prefill,
    check_key,
    check_limits,
    checked,
)
from rl_speed.sampling.logits import draw, request_keys, uniforms
from rl_speed.sampling.types import Array, Contexts, Decoder, Requests, SamplerConfig, Samples


class Slots(NamedTuple):
    """State of each slot: i32[S] each."""

    request: Array  # row of the request table; R, its capacity, for an idle slot
    token: Array  # token to feed next
    suffix_length: Array  # tokens fed so far, which is also the index of the next token drawn


class SlotRequests(NamedTuple):
    """The request of each slot, [S] each; any valid value for an idle slot."""

    context: Array  # row of the context pool
    context_length: Array  # context tokens that the sample starts from
    max_new: Array  # maximum new tokens
    key: Array  # the request's typed PRNG key
    drawn: Array | int = 0  # tokens of the sample from earlier calls, replies included


class Fixed(NamedTuple):
    """Constant inputs of a call's decode steps; `params` are prepared."""

    params: Any
    context_kv: Any
    requests: Requests
    keys_R: Array
    first_token_R: Array


class Decoding(NamedTuple):
    """State between decode steps of a call. `queue_next` i32[] is the next request of the queue."""

    slots: Slots
    queue_next: Array
    cache: Any
    samples: Samples


def prefill_pool(
    decoder: Decoder, params, contexts: Contexts, chunk: int, widths: tuple[int, ...] = ()
):
    """Computes the KV of the contexts in use.

    With chunk > 0, only ceil(count / chunk) chunks are computed, those of each width by themselves
    (see `SamplerConfig.prefill_widths`); the rest is zero.
    """
    capacity, length = contexts.tokens.shape
    widths = tuple(width for width in widths if width < length)
    if widths:
        return _prefill_by_width(decoder, params, contexts, min(chunk, capacity), (*widths, length))
    if chunk == 0 or chunk >= capacity:
        return call_prefill(decoder, params, contexts.tokens, contexts.lengths)
    pieces = -(-capacity // chunk)
    pad = pieces * chunk - capacity
    tokens = jnp.pad(contexts.tokens, ((0, pad), (0, 0)))
    lengths = jnp.pad(contexts.lengths, (0, pad), constant_values=1)

    def piece(i):
        def take(x):
            return jax.lax.dynamic_slice_in_dim(x, i * chunk, chunk)

        return call_prefill(decoder, params, take(tokens), take(lengths))

    pool = jax.tree.map(
        lambda x: jnp.zeros((pieces * chunk, *x.shape[1:]), x.dtype), jax.eval_shape(piece, 0)
    )

    def body(state):
        i, pool = state

        def put(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new, i * chunk, 0)

        return i + 1, jax.tree.map(put, pool, piece(i))

    return jax.lax.while_loop(lambda s: s[0] * chunk < contexts.count, body, (jnp.int32(0), pool))[
        1
    ]


def _prefill_by_width(
    decoder: Decoder, params, contexts: Contexts, chunk: int, widths: tuple[int, ...]
):
    capacity = len(contexts.lengths)

    def prefill(rows, width):
        tokens = contexts.tokens[rows, :width]
        return call_prefill(decoder, params, tokens, jnp.minimum(contexts.lengths[rows], width))

    pool = jax.tree.map(
        lambda x: jnp.zeros((capacity, *x.shape[1:]), x.dtype),
        jax.eval_shape(lambda: prefill(jnp.zeros(chunk, jnp.int32), widths[-1])),
    )
    kind_C = jnp.searchsorted(jnp.array(widths), contexts.lengths)
    kind_C = jnp.where(jnp.arange(capacity) < contexts.count, kind_C, len(widths))
    # Contexts of one width follow each other; `capacity` is no context.
    order = jnp.argsort(kind_C, stable=True).astype(jnp.int32)
    order = jnp.concatenate([order, jnp.full(chunk, capacity, jnp.int32)])
    for kind, width in enumerate(widths):
        first, end = (jnp.sum(kind_C < k, dtype=jnp.int32) for k in (kind, kind + 1))

        def body(state, width=width, end=end):
            start, pool = state
            at = start + jnp.arange(chunk, dtype=jnp.int32)
            rows = jnp.where(at < end, jax.lax.dynamic_slice(order, (start,), (chunk,)), capacity)

            def put(old, new, width=width):
                apart = [a != b for a, b in zip(old.shape[1:], new.shape[1:])]
                if old.ndim != new.ndim or sum(apart) > 1:
                    raise TypeError(
                        f"prefill returns arrays {new.shape} for {width} tokens and {old.shape} "
                        f"for {widths[-1]}: with prefill_widths they may differ in one axis"
                    )
                place = (rows, *(slice(0, size) for size in new.shape[1:]))
                return old.at[place].set(new, mode="drop")

            found = prefill(jnp.minimum(rows, capacity - 1), width)
            return start + chunk, jax.tree.map(put, pool, found)

        _, pool = jax.lax.while_loop(lambda s, end=end: s[0] < end, body, (first, pool))
    return pool


def no_samples(capacity: int, max_new: int) -> Samples:
    """Makes `Samples` of zeros, the state before any token is drawn."""
    shape = (capacity, max_new)
    zeros = jnp.zeros((capacity,), jnp.int32)
    no = jnp.zeros((capacity,), bool)
    zero = jnp.int32(0)
    return Samples(
        tokens=jnp.zeros(shape, jnp.int32),
        lengths=zeros,
        logprobs=jnp.zeros(shape, jnp.float32),
        kept_logmass=jnp.zeros(shape, jnp.float32),
        truncated=no,
        nonfinite=no,
        start_step=zeros,
        decode_steps=zero,
        slot_steps=zero,
        queue_steps=zero,
        queue_slot_steps=zero,
        room_steps=zero,
    )


def count_step(samples: Samples, busy: Array, waiting: Array, width: int) -> Samples:
    """Adds one iteration of the decode loop to the counters.

    Args:
      busy: i32[], busy rows. waiting: bool[], whether a request waited for a slot. width: all rows.
    """
    return samples.replace(
        decode_steps=samples.decode_steps + 1,
        slot_steps=samples.slot_steps + busy,
        queue_steps=samples.queue_steps + waiting,
        queue_slot_steps=samples.queue_slot_steps + busy * waiting,
        room_steps=samples.room_steps + width,
    )


def idle_slots(slots: int, capacity: int) -> Slots:
    """Makes slots without requests."""
    zeros = jnp.zeros((slots,), jnp.int32)
    return Slots(request=jnp.full((slots,), capacity, jnp.int32), token=zeros, suffix_length=zeros)


def refill(
    slots: Slots, queue_next: Array, requests: Requests, first_token_R: Array
) -> tuple[Slots, Array, Array]:
    """Gives idle slots the next requests, in table order.

    Returns (slots, queue_next, taken bool[S]).
    """
    capacity = requests.context.shape[0]
    idle = slots.request == capacity
    candidate = queue_next + jnp.cumsum(idle, dtype=jnp.int32) - 1
    taken = idle & (candidate < requests.count)
    row = jnp.minimum(candidate, capacity - 1)
    return (
        Slots(
            request=jnp.where(taken, candidate, slots.request),
            token=jnp.where(taken, first_token_R[row], slots.token),
            suffix_length=jnp.where(taken, 0, slots.suffix_length),
        ),
        queue_next + jnp.sum(taken, dtype=jnp.int32),
        taken,
    )


def whole_rows(logits: Array) -> Array:
    """Replicates logits over the devices of a shard, on a mesh.

    Drawing from a split vocabulary would need a collective permutation. All devices of the mesh
    take part in one, but shards leave the loop at different times: it would deadlock.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return logits
    return jax.lax.with_sharding_constraint(logits, PartitionSpec(*[None] * logits.ndim))


def decode_one(
    decoder: Decoder,
    params,
    context_kv,
    cache,
    slots: Slots,
    samples: Samples,
    mine: SlotRequests,
    config: SamplerConfig,
):
    """Decodes one token in every busy slot into its request's row; slots whose request ended become
    idle.

    Returns (slots, cache, samples, ended bool[S]). Counters do not change.
    """
    capacity = samples.lengths.shape[0]
    active = slots.request < capacity
    logits, cache = call_decode(
        decoder,
        params,
        context_kv,
        cache,
        slots.token,
        mine.context,
        mine.context_length - 1,
        slots.suffix_length,
        active,
    )
    with jax.named_scope("draw"):
        u = uniforms(mine.key, slots.suffix_length + mine.drawn)
        token, logprob, kept, finite = draw(whole_rows(logits), u, config)
    is_end = jnp.zeros_like(active)
    for end in config.end_tokens:
        is_end |= finite & (token == end)
    length = slots.suffix_length + finite
    ended = active & (is_end | ~finite | (length >= mine.max_new))

    # Idle slots, and slots without a drawn token, write to row `capacity`, which "drop" ignores. No
    # two slots hold the same request.
    def put(x, at, value):
        return x.at[at].set(value, mode="drop")

    cell = (jnp.where(finite, slots.request, capacity), slots.suffix_length)
    samples = samples.replace(
        tokens=put(samples.tokens, cell, token),
        logprobs=put(samples.logprobs, cell, logprob),
        lengths=put(samples.lengths, slots.request, length),
        truncated=put(samples.truncated, slots.request, ended & finite & ~is_end),
        nonfinite=put(samples.nonfinite, slots.request, ~finite),
    )
    if config.truncates:
        samples = samples.replace(kept_logmass=put(samples.kept_logmass, cell, kept))
    slots = Slots(
        request=jnp.where(ended, capacity, slots.request), token=token, suffix_length=length
    )
    return slots, cache, samples, ended


def requests_of(slots: Slots, requests: Requests, keys_R: Array) -> SlotRequests:
    """Returns the requests that the slots hold."""
    row = jnp.minimum(slots.request, requests.context.shape[0] - 1)
    return SlotRequests(
        context=requests.context[row],
        context_length=requests.context_length[row],
        max_new=requests.max_new[row],
        key=keys_R[row],
        drawn=0 if requests.drawn is None else requests.drawn[row],
    )


def check_tables(
    contexts: Contexts, requests: Requests, key: Array, config: SamplerConfig
) -> Requests:
    """Checks the tables, and returns the requests with `max_new` clamped to the config's.

    Raises ValueError that names the field if shapes disagree, and TypeError if the key is not a
    typed key.
    """
    check_key(key)
    if contexts.tokens.ndim != 2 or contexts.lengths.shape != contexts.tokens.shape[:1]:
        raise ValueError(
            f"Contexts.tokens must be [C, L] and lengths [C], got {contexts.tokens.shape} and "
            f"{contexts.lengths.shape}"
        )
    capacity = requests.context.shape
    columns = ("context_length", "visit", "sample_index", "max_new")
    for name in columns if requests.drawn is None else (*columns, "drawn"):
        if getattr(requests, name).shape != capacity or len(capacity) != 1:
            raise ValueError(
                f"Requests.{name} must have the shape of Requests.context, {capacity}, got "
                f"{getattr(requests, name).shape}"
            )
    return requests.replace(max_new=jnp.minimum(requests.max_new, config.max_new))


@checked(check_limits)
@functools.partial(jax.jit, static_argnames=("decoder", "config"))
def sample(
    decoder: Decoder,
    params,
    contexts: Contexts,
    requests: Requests,
    key: Array,
    config: SamplerConfig,
) -> Samples:
    """Draws every request of the table, in table order.

    Compiles once per (decoder, config, capacities); the numbers of contexts and requests in use may
    change. For a fixed number of slots, a request's tokens depend bit for bit only on (key, visit,
    sample_index), its context and the weights, not on other requests (with `tail_slots`, up to
    rounding).

    Args:
      decoder: the policy; static.
      params: its weights, before `prepare`.
      contexts: prompts, or prompts with prefixes.
      requests: samples to draw. Every `context_length` must be between 1 and its context's length
        (`tables.build_requests` checks this), and every `max_new` at most `config.max_new` (checked
        in NumPy tables, clamped in others).
      key: typed PRNG key of the run, the same in every step.
      config: static settings.

    Returns:
      `Samples`, in which row r belongs to request r.

    Raises:
      ValueError: shapes disagree, or a request's `max_new` is above the config's.
      TypeError: a decoder function returns a wrong type, or the key is not a typed key.
    """
    fixed, state = begin(decoder, params, contexts, requests, key, config=config)
    return decode_steps(decoder, fixed, state, config=config).samples


def begin(
    decoder: Decoder,
    params,
    contexts: Contexts,
    requests: Requests,
    key: Array,
    *,
    config: SamplerConfig,
) -> tuple[Fixed, Decoding]:
    """Prepares weights, prefills contexts and fills slots: `sample` before its first decode step.

    Args, Raises: as `sample`.
    """
    requests = check_tables(contexts, requests, key, config)
    capacity = requests.context.shape[0]
    params = decoder.prepare(params)
    with jax.named_scope("prefill"):
        context_kv = prefill_pool(
            decoder, params, contexts, config.prefill_chunk, config.prefill_widths
        )
    first_token_R = contexts.tokens[requests.context, jnp.maximum(requests.context_length - 1, 0)]
    slots, queue_next, _ = refill(
        idle_slots(config.slots, capacity), jnp.int32(0), requests, first_token_R
    )
    return Fixed(
        params=params,
        context_kv=context_kv,
        requests=requests,
        keys_R=request_keys(key, requests.visit, requests.sample_index),
        first_token_R=first_token_R,
    ), Decoding(
        slots=slots,
        queue_next=queue_next,
        cache=call_init_cache(decoder, config.slots, config.max_new),
        samples=no_samples(capacity, config.max_new),
    )


def decode_steps(
    decoder: Decoder,
    fixed: Fixed,
    state: Decoding,
    *,
    config: SamplerConfig,
    limit: Array | None = None,
) -> Decoding:
    """Makes at most `limit` decode steps, or all if None. Tokens do not depend on `limit`."""
    requests = fixed.requests
    capacity = fixed.requests.context.shape[0]

    def body(state: Decoding) -> Decoding:
        busy = jnp.sum(state.slots.request < capacity, dtype=jnp.int32)
        waiting = state.queue_next < requests.count
        slots, cache, samples, _ = decode_one(
            decoder,
            fixed.params,
            fixed.context_kv,
            cache=state.cache,
            slots=state.slots,
            samples=state.samples,
            mine=requests_of(state.slots, requests, fixed.keys_R),
            config=config,
        )
        slots, queue_next, taken = refill(slots, state.queue_next, requests, fixed.first_token_R)
        samples = count_step(samples, busy, waiting, len(state.slots.request))
        start = samples.start_step.at[jnp.where(taken, slots.request, capacity)].set(
            samples.decode_steps, mode="drop"
        )
        return Decoding(
            slots=slots,
            queue_next=queue_next,
            cache=cache,
            samples=samples.replace(start_step=start),
        )

    until = None if limit is None else state.samples.decode_steps + limit
    wider: list[tuple[Decoding, Array]] = []
    with jax.named_scope("decode_loop"):
        for narrower in (*config.tail_slots, 0):

            def goes_on(state: Decoding, narrower=narrower) -> Array:
                busy = jnp.sum(state.slots.request < capacity)
                more = (busy > narrower) | ((busy > 0) & (state.queue_next < requests.count))
                if requests.enough is not None:
                    more &= state.queue_next - busy < requests.enough
                return more if until is None else more & (state.samples.decode_steps < until)

            state = jax.lax.while_loop(goes_on, body, state)
            if narrower:
                row = jnp.argsort(state.slots.request == capacity)[:narrower]
                wider.append((state, row))

                def take(x, row=row):
                    return x[row]

                slots, cache = jax.tree.map(take, (state.slots, state.cache))
                state = state._replace(slots=slots, cache=cache)
    if until is None:
        return state
    for whole, row in reversed(wider):

        def put(old, new, row=row):
            return old.at[row].set(new)

        slots, cache = jax.tree.map(put, (whole.slots, whole.cache), (state.slots, state.cache))
        state = state._replace(slots=slots, cache=cache)
    return state
