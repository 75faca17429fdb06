"""The sampler's data: the policy as pure functions, contexts, requests, samples, counts, decisions.

Shape letters: C contexts, L context tokens, R requests, T new tokens, S slots, P prompts, V
vocabulary.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax
from flax import struct

Array = jax.Array

# Below so many rows XLA on CPUs multiplies in another order; from here on a narrower batch of a
# policy 256 wide drew the same log-probs, bit for bit (JAX 0.10.2; not so at width 128).
NARROWEST_TAIL = 16


def halved(slots: int) -> tuple[int, ...]:
    """Half of the slots, a quarter, ..., as long as these are NARROWEST_TAIL or more:
    for `SamplerConfig.tail_slots`.
    """
    widths = []
    while (slots := slots // 2) >= NARROWEST_TAIL:
        widths.append(slots)
    return tuple(widths)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A policy as the sampler sees it: pure functions, hashable,
    so that it is a static argument of jit.

    Build it once: functions are equal to themselves alone, so a `Decoder` made anew of the same
    lambdas or closures compiles every sampler anew, at each call. What the functions return is
    checked when they are traced (TypeError, naming the function); whether they compute the policy
    is what `check_decoder` finds out.

    Attributes:
      prefill: (params, tokens i32[C, L], lengths i32[C]) -> (context_kv, last_hidden [C, D],
        last_logits [C, V]). Every leaf of `context_kv` has contexts on axis 0. The samplers use
        `context_kv` alone: the other two may be None.
      init_cache: (slots, max_new) -> cache. Every leaf has slots on axis 0. Called inside jit.
      decode: (params, context_kv, cache, token i32[S], context_index i32[S], context_length i32[S],
        suffix_length i32[S], active bool[S]) -> (logits [S, V], cache). Row s feeds `token[s]`,
        which sits at position `context_length[s] + suffix_length[s]` and attends to the first
        `context_length[s]` tokens of its context, to the `suffix_length[s]` tokens its row has fed
        before, and to itself. The first token that a request feeds is the last of its context,
        again: `context_length` here is one less than the tokens it starts from. A fresh request
        starts at `suffix_length == 0` in a cache that still holds the row's last tenant, which must
        be masked. Rows that are not active may return anything. A row's result must not depend on
        the other rows. Logits may be of any float dtype; tokens are drawn in float32. A token whose
        logit is -inf is never drawn. A row with NaN, with +inf or with nothing but -inf has no
        distribution: its request ends there (`Samples.nonfinite`).
      prepare: params -> whatever the three functions take as `params`; run once per call (cast,
        unstacked copies).
      narrow: params -> params, before they are made whole on each shard of a mesh: a cast makes
        less to send.
    """

    prefill: Callable[..., Any]
    init_cache: Callable[..., Any]
    decode: Callable[..., Any]
    prepare: Callable[..., Any] = lambda params: params
    narrow: Callable[..., Any] = lambda params: params


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Static settings of the sampler.

    Attributes:
      slots: rows that decode together. More cost less a token where a step costs little more for
        more rows (accelerators); on a CPU a policy with dense attention may be faster with fewer.
      max_new: capacity of a response in tokens, the end token included.
      temperature: softmax temperature; 0 is greedy (log-probs are then those of temperature 1).
      top_k: keep the k likeliest tokens; 0 keeps all.
      top_p: keep the smallest set of tokens whose mass reaches top_p; 1 keeps all.
      end_tokens: ids that end a response; the end token is part of it.
      prefill_chunk: contexts prefilled together; 0 prefills the pool in one piece. With chunks,
        contexts beyond the number in use cost nothing.
      context_pool: `sample_adaptive`: contexts whose KV exists at once; 0: those of all candidates.
        Fewer are filled again, inside the loop, as prompts are decided.
      tail_slots: `sample`: narrower batches, descending, in which the last requests decode: the
        loop goes on with so many rows as soon as no more are busy and none waits. Each is a decode
        program of its own to compile. They pay where a step costs by its rows, as on CPUs
        (`halved`); accelerators read all weights whatever the rows. A token is then the same in
        any company up to the rounding of products of fewer rows.
    """

    slots: int
    max_new: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    end_tokens: tuple[int, ...] = ()
    prefill_chunk: int = 0
    context_pool: int = 0
    tail_slots: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "tail_slots", tuple(self.tail_slots))
        try:
            object.__setattr__(
                self, "end_tokens", tuple(operator.index(t) for t in self.end_tokens)
            )
        except TypeError:
            raise ValueError(
                "sampler.end_tokens must be token ids, such as (0,) or [0, 7]; got "
                f"{self.end_tokens!r}"
            ) from None
        for name, ok, want in (
            ("slots", self.slots >= 1, "at least 1"),
            ("max_new", self.max_new >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("prefill_chunk", self.prefill_chunk >= 0, "0 (one piece) or more"),
            ("context_pool", self.context_pool >= 0, "0 (all candidates) or more"),
            (
                "tail_slots",
                all(a > b > 0 for a, b in zip((self.slots, *self.tail_slots), self.tail_slots)),
                f"numbers of slots below {self.slots}, descending",
            ),
        ):
            if not ok:
                raise ValueError(f"sampler.{name} must be {want}, got {getattr(self, name)!r}")

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p removes tokens, so that samples do not follow the full
        distribution.
        """
        return self.top_k > 0 or self.top_p < 1


@struct.dataclass
class Contexts:
    """What samples start from: prompts, or prompts followed by part of a cached response.

    Attributes:
      tokens: i32[C, L], right-padded (pad ids are never looked at).
      lengths: i32[C], tokens in use.
      count: i32[], contexts in use; those at `count` and beyond are not prefilled (in
        whole chunks).
    """

    tokens: Array
    lengths: Array
    count: Array


@struct.dataclass
class Requests:
    """A table of samples to draw, of static capacity R and dynamic length `count`,
    served in table order.

    Attributes:
      context: i32[R], row of `Contexts`.
      context_length: i32[R], how many of its tokens this sample starts from (at least 1): samples
        that cut one cached response at different places share its prefill.
      visit: i32[R], serial number of the prompt's departure from the stream.
      sample_index: i32[R], which sample of that visit; (visit, sample_index) determines the
        randomness.
      max_new: i32[R], token limit of this sample, at most `SamplerConfig.max_new`: the samplers
        refuse more in a table of NumPy arrays, and take as much as is allowed from one that is
        on a device.
      count: i32[], rows in use.
    """

    context: Array
    context_length: Array
    visit: Array
    sample_index: Array
    max_new: Array
    count: Array


@struct.dataclass
class Samples:
    """What `sample` returns, row r for request r; rows beyond `Requests.count` are zero.

    Attributes:
      tokens: i32[R, T], new tokens, the end token included, zero after it.
      lengths: i32[R], new tokens.
      logprobs: f32[R, T], log-probability under the full tempered distribution, zero beyond
        the length.
      kept_logmass: f32[R, T], log of the probability mass that top-k/top-p kept (0 without them).
      truncated: bool[R], ended by its limit, not by an end token.
      nonfinite: bool[R], ended by logits that leave no distribution (see `Decoder`). The tokens
        drawn before are there, perhaps none; nothing was drawn at that place. No verifier sees such
        a sample: it counts as drawn and as wrong. Do not train on it: what the policy computes of
        it is likely not finite either.
      start_step: i32[R], iteration of the decode loop at which a slot took the request; with
        `lengths`, the schedule.
      decode_steps: i32[], iterations of the decode loop.
      slot_steps: i32[], rows that decoded, summed over iterations.
      queue_steps: i32[], iterations that began with requests waiting for a slot.
      queue_slot_steps: i32[], rows that decoded, summed over those iterations.
      room_steps: i32[], rows that there was room for (slots, fewer in the tail), summed over
        iterations.
    """

    tokens: Array
    lengths: Array
    logprobs: Array
    kept_logmass: Array
    truncated: Array
    nonfinite: Array
    start_step: Array
    decode_steps: Array
    slot_steps: Array
    queue_steps: Array
    queue_slot_steps: Array
    room_steps: Array


@struct.dataclass
class Prefixes:
    """Where the samples of candidates start: the prompt is followed by a response,
    of which each sample replays some tokens.

    Attributes:
      prompt_length: i32[P], tokens that are the prompt's own.
      length: i32[P, N], tokens of the response that sample i starts with; at most
        `Prompts.lengths - prompt_length`.
      max_new: i32[P, N], tokens it may add, at least 1; both together at most
        `SamplerConfig.max_new` (refused or clamped, as `Requests.max_new`).
    """

    prompt_length: Array
    length: Array
    max_new: Array


@struct.dataclass
class Prompts:
    """Candidates for `sample_adaptive`, in launch order,
    of static capacity P and dynamic length `count`.

    Attributes:
      tokens: i32[P, L], right-padded. lengths: i32[P], tokens in use, at least 1.
      visit: i32[P], serial number of the prompt's departure from the stream.
      answer: a pytree of arrays [P, ...], what `verify` compares with.
      count: i32[], rows in use.
      budget: i32[P] or None, samples each prompt may have, for rules that take one.
      estimate: f32[P] or None, pass rates as estimated before the visit; not the sampler's
        business, but the objective's.
      prefixes: where samples start; None: at the end of `tokens`. Responses are returned, and
        verified, whole.
    """

    tokens: Array
    lengths: Array
    visit: Array
    answer: Any
    count: Array
    budget: Array | None = None
    estimate: Array | None = None
    prefixes: Prefixes | None = None


@struct.dataclass
class AdaptiveSamples(Samples):
    """What `sample_adaptive` returns: row p * N + i is sample i of candidate p,
    N being the rule's `max_samples`.

    The first `consumed` candidates were decided; those behind them were not sampled as far as the
    caller is concerned (their rows are zero unless the surplus is kept), and belong back into
    the stream.

    Attributes (besides those of `Samples`; `queue_steps` counts iterations in which samples waited
    for a slot):
      rewards: f32[R], the verifier's verdicts; 0 for what is `nonfinite`.
      status: i32[P], COMPLETE, REJECTED, or OPEN for what was not decided.
      selected: bool[P], the groups asked for: complete, the first `target` of them in launch order.
      consumed: i32[], candidates used up.
      missing: i32[], groups short of the target because the candidates ran out.
      wasted_tokens: i32[], tokens drawn for candidates behind `consumed`.
      head_of_line_steps: i32[], iterations in which enough groups were complete but an earlier
        candidate was undecided.
      prefix: i32[R], tokens at the start of each response that were replayed: in `tokens` and
        `lengths`, with log-prob 0. None without `Prompts.prefixes`.
    """

    rewards: Array
    status: Array
    selected: Array
    consumed: Array
    missing: Array
    wasted_tokens: Array
    head_of_line_steps: Array
    prefix: Array | None = None


@struct.dataclass
class Counts:
    """What is known of each prompt's samples: i32[P] each.

    Attributes:
      launched: samples started. done: samples finished and scored. positive: of those,
        correct ones.
      varied: bool[P], whether the rewards of those done, as they would be trained on, are not all
        the same. None where nobody knows: inside the compiled loop, and in simulations of verdicts.
    """

    launched: Array
    done: Array
    positive: Array
    varied: Array | None = None


# Values of Decision.status.
OPEN = 0
COMPLETE = 1
REJECTED = 2
# Values of RuleState.phase. A prompt that was accepted keeps its verdict whatever its later
# samples say.
SCREENING = 0
ACCEPTED = 1
CLOSED = 2


@struct.dataclass
class Decision:
    """A rule's answer: `want` i32[P], samples to have launched in all; `status` i32[P],
    OPEN, COMPLETE or REJECTED.
    """

    want: Array
    status: Array


@struct.dataclass
class RuleState:
    """What a rule remembers of each prompt: i32[P] each.

    Attributes:
      phase: SCREENING, ACCEPTED (continuing) or CLOSED.
      round: rounds of sampling asked for so far.
      budget: samples this prompt may have in all.
    """

    phase: Array
    round: Array
    budget: Array
