"""A JetStream engine over the policy's pure functions: what the sampler does in its loop,
one step at a time.

Each slot has a row of the context pool and `samples_per_slot` rows of the cache. Prefill computes a
prompt's KV; insert copies it into the slot's row; generate feeds every row one token. As in the
sampler, a row starts by feeding the last token of its context again, so that the first token comes
from the same decode step as the others.

JetStream has no call that frees a slot: a row that has ended stays, draws nothing, and says that
its tokens are not valid.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_speed.policy import DecodeAttention, ModelConfig, decoder, load_tokenizer
from rl_speed.sampling import Decoder, SamplerConfig
from rl_speed.sampling.logits import draw, request_keys, uniforms
from rl_speed.serving.package import engine_api, tokenizer_pb2
from rl_speed.serving.policy import ServedPolicy
from rl_speed.serving.tokenizer import PolicyTokenizer, pad, prefill_lengths

Array = jax.Array


@struct.dataclass
class Prefix:
    """A prompt after prefill: `kv` as of one context; i32[] each: `token`, its last,
    `length`, tokens in use, `visit`.
    """

    kv: Any
    token: Array
    length: Array
    visit: Array


@struct.dataclass
class Rows:
    """What generate changes: `cache` of R rows; `token` i32[R], fed next;
    `suffix_length` i32[R], fed so far; `active` bool[R].
    """

    cache: Any
    token: Array
    suffix_length: Array
    active: Array


@struct.dataclass
class DecodeState:
    """`context_kv` as of N contexts, one a slot; `context_length` and `visit`, i32[N] each,
    of the slots' tenants; `rows`.
    """

    context_kv: Any
    context_length: Array
    visit: Array
    rows: Rows


@functools.partial(jax.jit, static_argnames="policy")
def _prefill(policy: Decoder, params: Any, tokens_L: Array, length: Array) -> Any:
    return policy.prefill(params, tokens_L[None], length[None])[0]


@functools.partial(jax.jit, static_argnames=("policy", "config", "samples", "longest"))
def _init(
    policy: Decoder, params: Any, config: SamplerConfig, samples: int, longest: int
) -> DecodeState:
    slots = config.slots // samples
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
        jnp.zeros((slots,), jnp.int32),
        Rows(
            policy.init_cache(config.slots, config.max_new),
            rows,
            rows,
            jnp.zeros((config.slots,), bool),
        ),
    )


@functools.partial(jax.jit, static_argnames="samples", donate_argnames="state")
def _insert(state: DecodeState, prefix: Prefix, slot: Array, samples: int) -> DecodeState:
    # What the row's last tenant left behind is masked: behind its context's length, and
    # in its cache.
    put = lambda pool, new: jax.lax.dynamic_update_slice(pool, new, (slot, *[0] * (pool.ndim - 1)))
    rows = jnp.arange(state.rows.token.shape[0]) // samples == slot
    return DecodeState(
        jax.tree.map(put, state.context_kv, prefix.kv),
        state.context_length.at[slot].set(prefix.length),
        state.visit.at[slot].set(prefix.visit),
        state.rows.replace(
            token=jnp.where(rows, prefix.token, state.rows.token),
            suffix_length=jnp.where(rows, 0, state.rows.suffix_length),
            active=state.rows.active | rows,
        ),
    )


@functools.partial(jax.jit, static_argnames=("policy", "config", "samples"), donate_argnames="rows")
def _generate(
    policy: Decoder,
    params: Any,
    context_kv: Any,
    context_length: Array,
    visit: Array,
    rows: Rows,
    key: Array,
    config: SamplerConfig,
    samples: int,
) -> tuple[Rows, Array]:
    """Returns (rows, i32[R, 3]: token, whether it is one, length of the response so far)."""
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
    keys = request_keys(key, visit[slot], row % samples)
    drawn, _, _, finite = draw(logits, uniforms(keys, rows.suffix_length), config)
    # Where logits leave no distribution the response ends, as behind its last token: with a row
    # that is not valid.
    valid = rows.active & finite
    token = jnp.where(valid, drawn, rows.token)
    is_end = jnp.zeros_like(rows.active)
    for end in config.end_tokens:
        is_end |= token == end
    length = rows.suffix_length + valid
    going = valid & ~is_end & (length < config.max_new)
    return Rows(cache, token, length, going), jnp.stack(
        [token, valid.astype(jnp.int32), length], axis=1
    )


class PolicyEngine(engine_api.Engine):
    """Prefill and continuous batching of one policy on one device.

    With equal `config.slots`, weights and precision, a response has the tokens that `sample` draws
    for the same prompt, `key`, visit and sample index; prompts are given visits 0, 1, ... in the
    order in which they are prefilled.

    Args:
      policy: what to serve; its weights are laid out for decoding here, once.
      config: `slots` rows that decode together, `max_new` the longest response, how tokens are
        drawn. End tokens are the policy's.
      max_prefill_length: tokens of the longest prompt.
      samples_per_slot: responses to each prompt; divides `config.slots`.
      prompt: how a text becomes a prompt, see `policy.encode_prompt`.
      key: typed PRNG key of all draws. attention: how decoding reads keys and values.
      device: where it runs; by default the first.

    Raises:
      ValueError: a size is out of range, or prompt and response may be longer than the
        policy's positions.
      FileNotFoundError: the policy's directory holds no tokenizer.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        config: SamplerConfig,
        max_prefill_length: int,
        samples_per_slot: int = 1,
        prompt: str = "plain",
        key: Array | None = None,
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
                f"exceed the policy's {self.model.max_position} positions"
            )
        self.config = dataclasses.replace(config, end_tokens=policy.end_tokens)
        self._samples, self._longest, self._prompt = samples_per_slot, max_prefill_length, prompt
        self._directory, self._visits = policy.directory, itertools.count()
        # JetStream's threads, in which no error may happen, build their own: what is wrong with the
        # directory is said here. They do so at the same time, while transformers' lazy import is
        # not made for several threads: it is over by then.
        self.build_tokenizer(self.get_tokenizer())
        self._decoder = decoder(self.model, attention=attention)
        self._mesh = Mesh(np.array([device or jax.devices()[0]]), ("x",))
        place = self.get_prefix_destination_sharding()
        self._key = jax.device_put(jax.random.key(0) if key is None else key, place)
        self._params = jax.jit(self._decoder.prepare)(jax.device_put(policy.params, place))

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """The weights as `prefill` and `generate` take them."""
        return self._params

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Prefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> Prefix:
        """KV of a prompt.

        Args:
          padded_tokens: i32[L] of which the first `true_length` count; a program is compiled
            for each L.

        Raises ValueError for a length that is none, and NotImplementedError for `existing_prefix`.
        """
        if existing_prefix is not None:
            raise NotImplementedError("a prefix cannot be continued: give the whole prompt")
        tokens = np.asarray(padded_tokens, np.int32)
        if tokens.ndim != 1 or not 1 <= true_length <= len(tokens) <= self._longest:
            raise ValueError(
                f"prefill of {true_length} tokens of an array of shape {tokens.shape}; there must "
                f"be at least one, and room for at most {self._longest}"
            )
        place = lambda x: jax.device_put(
            np.asarray(x, np.int32), self.get_prefix_destination_sharding()
        )
        length = place(true_length)
        return Prefix(
            _prefill(self._decoder, params, place(tokens), length),
            place(tokens[true_length - 1]),
            length,
            place(next(self._visits)),
        )

    def insert(self, prefix: Prefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """The state (donated) with a prompt in `slot`, whose rows start afresh."""
        if not 0 <= slot < self.max_concurrent_decodes:
            raise ValueError(f"slot {slot} is none of 0 to {self.max_concurrent_decodes - 1}")
        return _insert(decode_state, prefix, np.int32(slot), self._samples)

    def generate(
        self, params: Any, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """One token in every row that goes on. The state is donated.

        A row ends with an end token, which is still valid, or with its token number `max_new`.
        """
        s = decode_state
        rows, data = _generate(
            self._decoder,
            params,
            s.context_kv,
            s.context_length,
            s.visit,
            s.rows,
            self._key,
            self.config,
            self._samples,
        )
        return s.replace(rows=rows), engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=self._samples,
        )

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """All slots free."""
        return _init(self._decoder, self._params, self.config, self._samples, self._longest)

    def warm_up(self) -> None:
        """Compile everything that requests will need:
        prefill and insert at each length, generate.
        """
        state = self.init_decode_state()
        for length in prefill_lengths(self._longest):
            prefix = Prefix(
                _prefill(
                    self._decoder,
                    self._params,
                    *jax.device_put(
                        (np.zeros((length,), np.int32), np.int32(length)),
                        self.get_prefix_destination_sharding(),
                    ),
                ),
                *jax.device_put(
                    (np.int32(0), np.int32(length), np.int32(0)),
                    self.get_prefix_destination_sharding(),
                ),
            )
            state = self.insert(prefix, state, 0)
        jax.block_until_ready(self.generate(self._params, state)[1].data)

    def pad(self, ids: list[int]) -> np.ndarray:
        """`tokenizer.pad` to this engine's lengths."""
        return pad(ids, self._longest)

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Whole, on this engine's device."""
        return NamedSharding(self._mesh, PartitionSpec())

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Names the policy's directory."""
        return tokenizer_pb2.TokenizerParameters(path=str(self._directory))

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> PolicyTokenizer:
        """A tokenizer of the directory; each call a new one, for a thread of its own."""
        return PolicyTokenizer(
            load_tokenizer(metadata.path), self.config.end_tokens, self._prompt, self._longest
        )

    @property
    def max_concurrent_decodes(self) -> int:
        """Slots: prompts that decode together."""
        return self.config.slots // self._samples

    @property
    def samples_per_slot(self) -> int:
        """Responses to each prompt."""
        return self._samples

    @property
    def max_prefill_length(self) -> int:
        """Tokens of the longest prompt."""
        return self._longest

    @property
    def mesh(self) -> Mesh:
        """Of one device."""
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        """None are used."""
        return None
