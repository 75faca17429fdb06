"""Decoding engine with prefill, insert and generate: the sampler's loop, one step at a time.

Each slot has a row of the context pool and `samples_per_slot` rows of the cache. Prefill computes a
prompt's KV, insert copies it into the slot's row, and generate feeds one token to every row. As in
the sampler, a row first feeds the last token of its context again, so the first token comes from
the same decode step as the others. An ended row is inactive until its slot gets the next prompt.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_speed.policy import DecodeAttention, ModelConfig, decoder
from rl_speed.sampling import Decoder, SamplerConfig
from rl_speed.sampling.logits import draw, keep_mask, nucleus_mask, uniforms
from rl_speed.serving.policy import ServedPolicy

Array = jax.Array

SHORTEST = 16  # tokens of the shortest padded prompt
MAX_TOP = 20  # most alternatives with log-probs per token


@struct.dataclass
class Prefix:
    """A prompt after prefill.

    Attributes:
      kv: keys and values of one context. token: i32[], its last token. length: i32[], its number of
        tokens.
    """

    kv: Any
    token: Array
    length: Array


@struct.dataclass
class Draws:
    """Sampling settings of one slot, or arrays over all slots.

    Attributes:
      key: typed PRNG key. temperature: f32, 0 is greedy. top_p: f32. limit: i32, most tokens of a
        response.
    """

    key: Any
    temperature: Any
    top_p: Any
    limit: Any


@struct.dataclass
class Rows:
    """State of R rows that generate changes.

    Attributes:
      cache: KV cache. token: i32[R], token to feed next. suffix_length: i32[R], tokens of the
        response so far. active: bool[R], whether the row decodes.
    """

    cache: Any
    token: Array
    suffix_length: Array
    active: Array


@struct.dataclass
class DecodeState:
    """State of N slots.

    Attributes:
      context_kv: keys and values of N contexts. context_length: i32[N]. draws: settings of N slots.
      rows: state of all rows.
    """

    context_kv: Any
    context_length: Array
    draws: Draws
    rows: Rows


@struct.dataclass
class Step:
    """One token per row.

    Attributes:
      data: i32[R, 3]: token, whether it is valid, length of the response so far.
      logprob: f32[R], at temperature 1. top_tokens: i32[R, K] and top_logprobs: f32[R, K], the most
        probable tokens, descending. All are 0 unless generate computes log-probs.
    """

    data: Array
    logprob: Array
    top_tokens: Array
    top_logprobs: Array


@functools.partial(jax.jit, static_argnames="policy")
def _prefill(policy: Decoder, params: Any, tokens_L: Array, length: Array) -> Any:
    return policy.prefill(params, tokens_L[None], length[None])[0]


@functools.partial(jax.jit, static_argnames=("policy", "config", "slots", "longest"))
def _init(
    policy: Decoder, params: Any, config: SamplerConfig, slots: int, longest: int
) -> DecodeState:
    one = jax.eval_shape(
        policy.prefill,
        params,
        jax.ShapeDtypeStruct((1, longest), jnp.int32),
        jax.ShapeDtypeStruct((1,), jnp.int32),
    )[0]
    rows = jnp.zeros((config.slots,), jnp.int32)
    return DecodeState(
        jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), one),
        jnp.ones((slots,), jnp.int32),
        Draws(
            jax.random.split(jax.random.key(0), slots),
            jnp.zeros((slots,)),
            jnp.ones((slots,)),
            jnp.ones((slots,), jnp.int32),
        ),
        Rows(
            policy.init_cache(config.slots, config.max_new),
            rows,
            rows,
            jnp.zeros((config.slots,), bool),
        ),
    )


@functools.partial(jax.jit, static_argnames="samples", donate_argnames="state")
def _insert(
    state: DecodeState, prefix: Prefix, draws: Draws, slot: Array, samples: int
) -> DecodeState:
    # Values from the slot's previous prompt are masked: past the context's length, and in the
    # cache.
    def put(pool, new):
        return jax.lax.dynamic_update_slice(pool, new, (slot, *[0] * (pool.ndim - 1)))

    rows = jnp.arange(state.rows.token.shape[0]) // samples == slot
    return DecodeState(
        jax.tree.map(put, state.context_kv, prefix.kv),
        state.context_length.at[slot].set(prefix.length),
        jax.tree.map(lambda pool, new: pool.at[slot].set(new), state.draws, draws),
        state.rows.replace(
            token=jnp.where(rows, prefix.token, state.rows.token),
            suffix_length=jnp.where(rows, 0, state.rows.suffix_length),
            active=state.rows.active | rows,
        ),
    )


def draw_rows(
    logits_RxV: Array, u_R: Array, temperature_R: Array, top_p_R: Array, config: SamplerConfig
) -> tuple[Array, Array]:
    """Draws one token per row, as `draw` does, with a temperature and a top_p per row.

    Args:
      config: sampling settings, of which top_k is used.

    Returns (token i32[R], finite bool[R]: whether the row's logits are finite).
    """
    greedy_R = temperature_R == 0
    exact = dataclasses.replace(config, temperature=0.0, top_k=0, top_p=1.0)
    best_R, _, _, finite_R = draw(logits_RxV, u_R, exact)

    def cut(scaled: Array) -> Array:
        keep = nucleus_mask(scaled, top_p_R[:, None]) | (top_p_R[:, None] >= 1)
        return jnp.where(keep, scaled, -jnp.inf)

    def drawn() -> Array:
        scaled = logits_RxV.astype(jnp.float32) / jnp.where(greedy_R, 1, temperature_R)[:, None]
        scaled = jnp.where(keep_mask(scaled, config.top_k, 1.0), scaled, -jnp.inf)
        # The vocabulary is sorted only if a row needs it.
        scaled = jax.lax.cond(jnp.any(top_p_R < 1), cut, lambda x: x, scaled)
        return draw(scaled, u_R, dataclasses.replace(exact, temperature=1.0))[0]

    return jnp.where(
        greedy_R, best_R, jax.lax.cond(jnp.all(greedy_R), lambda: best_R, drawn)
    ), finite_R


def _logprobs(logits_RxV: Array, token_R: Array, wanted: Array) -> tuple[Array, Array, Array]:
    rows, vocab = logits_RxV.shape
    top = min(MAX_TOP, vocab)

    def compute() -> tuple[Array, Array, Array]:
        # OpenAI's minimum: JSON has no infinity.
        logp = jnp.maximum(jax.nn.log_softmax(logits_RxV.astype(jnp.float32)), -9999.0)
        top_logprobs, top_tokens = jax.lax.top_k(logp, top)
        return jnp.take_along_axis(logp, token_R[:, None], axis=1)[:, 0], top_tokens, top_logprobs

    def nothing() -> tuple[Array, Array, Array]:
        return jnp.zeros((rows,)), jnp.zeros((rows, top), jnp.int32), jnp.zeros((rows, top))

    return jax.lax.cond(wanted, compute, nothing)


@functools.partial(jax.jit, static_argnames=("policy", "config", "samples"), donate_argnames="rows")
def _generate(
    policy: Decoder,
    params: Any,
    context_kv: Any,
    context_length: Array,
    draws: Draws,
    rows: Rows,
    logprobs: Array,
    config: SamplerConfig,
    samples: int,
) -> tuple[Rows, Step]:
    row = jnp.arange(config.slots)
    slot = row // samples
    logits, cache = policy.decode(
        params,
        context_kv,
        rows.cache,
        rows.token,
        slot,
        context_length[slot] - 1,
        rows.suffix_length,
        rows.active,
    )
    keys = jax.vmap(jax.random.fold_in)(draws.key[slot], row % samples)
    # The settings of a free slot's last prompt must not change the computation for other slots.
    temperature = jnp.where(rows.active, draws.temperature[slot], 0.0)
    top_p = jnp.where(rows.active, draws.top_p[slot], 1.0)
    drawn, finite = draw_rows(
        logits, uniforms(keys, rows.suffix_length), temperature, top_p, config=config
    )
    # If logits are not finite, the response ends with an invalid token.
    valid = rows.active & finite
    token = jnp.where(valid, drawn, rows.token)
    is_end = jnp.zeros_like(rows.active)
    for end in config.end_tokens:
        is_end |= token == end
    length = rows.suffix_length + valid
    going = valid & ~is_end & (length < draws.limit[slot])
    data = jnp.stack([token, valid.astype(jnp.int32), length], axis=1)
    return Rows(cache, token, length, going), Step(data, *_logprobs(logits, token, logprobs))


@jax.jit
def _seed_key(low: Array, high: Array, index: Array) -> Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(low), high), index)


def seed_key(seed: int, index: int) -> Array:
    """Typed PRNG key of response `index` of a request, from all 64 bits of its seed."""
    words = [np.uint32((seed >> shift) & 0xFFFFFFFF) for shift in (0, 32)]
    return _seed_key(*words, np.uint32(index))


def prefill_lengths(longest: int) -> list[int]:
    """Padded prompt lengths: powers of two from 16 below `longest`, and `longest`. Each has its own
    compiled program.
    """
    lengths = [SHORTEST * 2**i for i in range(longest.bit_length()) if SHORTEST * 2**i < longest]
    return [*lengths, longest]


def pad(ids: np.ndarray | list[int], longest: int) -> np.ndarray:
    """Pads token ids with 0 to i32[L], with the smallest L of `prefill_lengths(longest)` that fits.

    Raises ValueError if there are no ids, or more than `longest`.
    """
    if not 1 <= len(ids) <= longest:
        raise ValueError(f"the prompt has {len(ids)} tokens; it must have between 1 and {longest}")
    length = next(n for n in prefill_lengths(longest) if n >= len(ids))
    return np.pad(np.asarray(ids, np.int32), (0, length - len(ids)))


class Engine:
    """Prefills prompts and decodes responses in slots, for one policy on one device.

    With equal `config.slots`, weights and precision, a response has the same tokens as from
    `sample` with the same prompt, key, sample index and settings.

    Args:
      policy: policy to serve; its weights are converted for decoding once, here.
      config: `slots`: rows that decode together; `max_new`: most tokens of a response; `top_k` for
        all prompts. Temperature and top_p are per prompt, and end tokens are the policy's.
      max_prefill_length: most tokens of a prompt.
      samples_per_slot: responses per prompt; divides `config.slots`.
      attention: attention settings of decoding. device: None: the first.

    Raises:
      ValueError: a size is out of range, or prompt and response may exceed the policy's positions.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        config: SamplerConfig,
        max_prefill_length: int,
        samples_per_slot: int = 1,
        attention: DecodeAttention = DecodeAttention(),
        device: jax.Device | None = None,
    ):
        self.model: ModelConfig = policy.model
        if max_prefill_length < 1:
            raise ValueError(f"max_prefill_length must be at least 1, got {max_prefill_length}")
        if samples_per_slot < 1 or config.slots % samples_per_slot:
            raise ValueError(
                f"samples_per_slot must divide config.slots ({config.slots} rows), got "
                f"{samples_per_slot}"
            )
        if max_prefill_length + config.max_new > self.model.max_position:
            raise ValueError(
                f"max_prefill_length {max_prefill_length} and max_new {config.max_new} together "
                f"exceed the policy's {self.model.max_position} positions: lower one of them"
            )
        self.config = dataclasses.replace(config, end_tokens=policy.end_tokens)
        self.samples_per_slot = samples_per_slot
        self.slots = config.slots // samples_per_slot
        self.max_prefill_length = max_prefill_length
        self._decoder = decoder(self.model, attention=attention)
        self.mesh = Mesh(np.array([device or jax.devices()[0]]), ("x",))
        self.sharding = NamedSharding(self.mesh, PartitionSpec())
        self.params = jax.jit(self._decoder.prepare)(jax.device_put(policy.params, self.sharding))

    def prefill(self, ids: np.ndarray | list[int]) -> Prefix:
        """Computes the KV of a prompt of token ids. Raises ValueError for none or too many ids."""

        def place(x):
            return jax.device_put(np.asarray(x, np.int32), self.sharding)

        tokens = place(pad(ids, self.max_prefill_length))
        length = place(len(ids))
        return Prefix(_prefill(self._decoder, self.params, tokens, length), place(ids[-1]), length)

    def insert(self, state: DecodeState, prefix: Prefix, slot: int, draws: Draws) -> DecodeState:
        """Puts a prompt into `slot` and resets the slot's rows. The state is donated.

        Args:
          draws: settings of the slot; row i of the slot draws with `fold_in(draws.key, i)`.

        Raises ValueError for a slot or limit out of range.
        """
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot must be between 0 and {self.slots - 1}, got {slot}")
        if not 1 <= draws.limit <= self.config.max_new:
            raise ValueError(
                f"draws.limit must be between 1 and {self.config.max_new} tokens, got {draws.limit}"
            )
        draws = Draws(
            draws.key, np.float32(draws.temperature), np.float32(draws.top_p), np.int32(draws.limit)
        )
        return _insert(state, prefix, draws, np.int32(slot), samples=self.samples_per_slot)

    def generate(self, state: DecodeState, logprobs: bool = False) -> tuple[DecodeState, Step]:
        """Decode one token in every active row. The state is donated.

        A row ends with an end token, which is still valid, or at its limit.
        """
        rows, step = _generate(
            self._decoder,
            self.params,
            state.context_kv,
            context_length=state.context_length,
            draws=state.draws,
            rows=state.rows,
            logprobs=np.bool_(logprobs),
            config=self.config,
            samples=self.samples_per_slot,
        )
        return state.replace(rows=rows), step

    def init_state(self) -> DecodeState:
        """Returns a state in which all slots are free."""
        return _init(
            self._decoder, self.params, self.config, self.slots, longest=self.max_prefill_length
        )

    def warm_up(self) -> None:
        """Compile all programs: prefill and insert for each prompt length, and generate."""
        state = self.init_state()
        draws = Draws(seed_key(0, 0), 0.0, 1.0, 1)
        for length in prefill_lengths(self.max_prefill_length):
            state = self.insert(state, self.prefill([0] * length), 0, draws)
        jax.block_until_ready(self.generate(state)[1])
