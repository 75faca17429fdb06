"""Engine with JetStream's interface.

JetStream has no call that frees a slot. An ended row stays inactive, and its tokens are marked as
invalid.
"""

import itertools
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding

from rl_speed.policy import DecodeAttention, ModelConfig, load_tokenizer
from rl_speed.sampling import SamplerConfig
from rl_speed.serving.engine import DecodeState, Draws, Engine, Prefix, pad
from rl_speed.serving.jetstream.package import engine_api, tokenizer_pb2
from rl_speed.serving.jetstream.tokenizer import PolicyTokenizer
from rl_speed.serving.policy import ServedPolicy

Array = jax.Array


@struct.dataclass
class NumberedPrefix:
    """A `prefix` with the `visit` number, i32[], that keys its randomness."""

    prefix: Prefix
    visit: Array


class PolicyEngine(engine_api.Engine):
    """`Engine` with JetStream's interface.

    With equal `config.slots`, weights and precision, a response has the same tokens as from
    `sample` with the same prompt, `key`, visit and sample index. Prompts get visits 0, 1, ... in
    prefill order.

    Args:
      policy, max_prefill_length, samples_per_slot, attention, device: see `Engine`.
      config: `slots`: rows that decode together; `max_new`: most tokens of a response; sampling
        settings. End tokens are the policy's.
      prompt: format of a prompt's text, see `policy.encode_prompt`.
      key: typed PRNG key of all responses; None: key 0.

    Raises:
      ValueError: see `Engine`.
      FileNotFoundError: the policy's directory has no tokenizer.
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
        self._core = Engine(
            policy,
            config,
            max_prefill_length,
            samples_per_slot=samples_per_slot,
            attention=attention,
            device=device,
        )
        self.model: ModelConfig = policy.model
        self.config = self._core.config
        self._prompt = prompt
        self._directory = policy.directory
        self._visits = itertools.count()
        self._key = jax.random.key(0) if key is None else key
        # JetStream's threads build their own tokenizers at the same time. They must not raise, so a
        # bad directory must fail here. transformers' lazy import is not thread-safe, so it must
        # happen here, before the threads.
        self.build_tokenizer(self.get_tokenizer())

    def load_params(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the weights. `prefill` and `generate` ignore their `params` and use these."""
        return self._core.params

    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: NumberedPrefix | None = None,
        padded_tokens: Any,
        true_length: int,
    ) -> NumberedPrefix:
        """Computes the KV of a prompt.

        Args:
          padded_tokens: i32[L]; the first `true_length` are valid.

        Raises ValueError for an invalid length, and NotImplementedError for `existing_prefix`.
        """
        if existing_prefix is not None:
            raise NotImplementedError("a prefix cannot be continued: give the whole prompt")
        tokens = np.asarray(padded_tokens, np.int32)
        longest = self.max_prefill_length
        if tokens.ndim != 1 or not 1 <= true_length <= len(tokens) <= longest:
            raise ValueError(
                f"padded_tokens must be a vector of at most {longest} tokens with true_length from "
                f"1 to its size; got shape {tokens.shape} and true_length {true_length}"
            )
        visit = jax.device_put(np.int32(next(self._visits)), self._core.sharding)
        return NumberedPrefix(self._core.prefill(tokens[:true_length]), visit)

    def insert(self, prefix: NumberedPrefix, decode_state: DecodeState, slot: int) -> DecodeState:
        """Puts a prompt into `slot` and resets the slot's rows. The state is donated."""
        draws = Draws(
            jax.random.fold_in(self._key, prefix.visit),
            self.config.temperature,
            self.config.top_p,
            self.config.max_new,
        )
        return self._core.insert(decode_state, prefix.prefix, slot, draws=draws)

    def generate(
        self, params: Any, decode_state: DecodeState
    ) -> tuple[DecodeState, engine_api.ResultTokens]:
        """Decode one token in every active row. The state is donated.

        A row ends with an end token, which is still valid, or after `max_new` tokens.
        """
        state, step = self._core.generate(decode_state)
        return state, engine_api.ResultTokens(
            data=step.data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=self.samples_per_slot,
        )

    def init_decode_state(self, *args: Any, **kwargs: Any) -> DecodeState:
        """Returns a state in which all slots are free."""
        return self._core.init_state()

    def warm_up(self) -> None:
        """See `Engine.warm_up`."""
        self._core.warm_up()

    def pad(self, ids: list[int]) -> np.ndarray:
        """Pad ids as `engine.pad` does, to this engine's lengths."""
        return pad(ids, self.max_prefill_length)

    def get_prefix_destination_sharding(self) -> NamedSharding:
        """Sharding of a prefix: whole, on this engine's device."""
        return self._core.sharding

    def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
        """Returns tokenizer parameters with the policy's directory."""
        return tokenizer_pb2.TokenizerParameters(path=str(self._directory))

    def build_tokenizer(self, metadata: tokenizer_pb2.TokenizerParameters) -> PolicyTokenizer:
        """Builds a new tokenizer of the directory, for one thread."""
        return PolicyTokenizer(
            load_tokenizer(metadata.path),
            self.config.end_tokens,
            self._prompt,
            longest=self.max_prefill_length,
        )

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots: prompts that decode together."""
        return self._core.slots

    @property
    def samples_per_slot(self) -> int:
        """Responses per prompt."""
        return self._core.samples_per_slot

    @property
    def max_prefill_length(self) -> int:
        """Most tokens of a prompt."""
        return self._core.max_prefill_length

    @property
    def mesh(self) -> Mesh:
        """The mesh of one device."""
        return self._core.mesh

    @property
    def colocated_cpus(self) -> None:
        """None: no CPUs are used."""
        return None
