"""The in-loop driver: a sampling rule and a verifier inside the compiled decode loop.

Prompts are screened, decided and continued in one call, so the current policy draws every sample
and nothing waits for the host. Each iteration of a `lax.while_loop`

1. prefills the next candidates, if slots would otherwise idle and the context pool has free room;
2. gives idle slots their next sample: continued prompts before new ones, both in launch order;
3. decodes one token in every slot;
4. verifies the samples that ended, and lets the rule decide every prompt whose samples are all
   done.

The loop ends when the first `target` accepted prompts in launch order are complete and every prompt
before them is decided. So the result depends only on keys, prompts and weights, not on the number
of slots or the order in which samples end. Samples of later prompts are discarded and counted.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl_speed.sampling.callback import HostVerify, raising
from rl_speed.sampling.contract import (
    call_init_cache,
    call_prefill,
    call_verify,
    check_key,
    check_prefixes,
    checked,
)
from rl_speed.sampling.logits import request_keys
from rl_speed.sampling.rules import Rule, check_decisions
from rl_speed.sampling.sampler import (
    SlotRequests,
    Slots,
    count_step,
    decode_one,
    idle_slots,
    no_samples,
)
from rl_speed.sampling.types import (
    ACCEPTED,
    COMPLETE,
    OPEN,
    AdaptiveSamples,
    Array,
    Counts,
    Decoder,
    Prompts,
    RuleState,
    SamplerConfig,
    Samples,
)

# (tokens i32[S, T], lengths i32[S], answer: pytree of [S, ...]) -> rewards f32[S]; a sample is
# correct if its reward is above one half. Called with all slots whenever a sample ends. Rows of
# length 0 did not end in this step; their reward is ignored.
Verify = Callable[[Array, Array, Any], Array]


class Pool(NamedTuple):
    """The pool of prefilled contexts. C entries serve P candidates in turn."""

    kv: Any
    prompt: Array  # i32[C], the candidate in each entry; P if empty
    entry: Array  # i32[P], the entry of each candidate; C if none
    loaded: Array  # i32[], candidates prefilled so far, in launch order


class CandidateState(NamedTuple):
    """State of each candidate: its counts, and the rule's last decision (see `Decision`)."""

    counts: Counts
    want: Array
    status: Array
    rule: RuleState


class State(NamedTuple):
    slots: Slots
    keys: Array  # [S, ...], data of each slot's request key
    pool: Pool
    cache: Any
    samples: Samples
    rewards: Array
    known: CandidateState
    head_of_line: Array  # i32[], see `AdaptiveSamples.head_of_line_steps`
    going: Array  # bool[]


def before(x_P: Array) -> Array:
    """Returns the sum of x over the candidates before each, in order of launch, i32[P]."""
    x_P = x_P.astype(jnp.int32)
    return jnp.cumsum(x_P) - x_P


def accepted(known: CandidateState) -> Array:
    """Returns which candidates are complete or accepted, bool[P]."""
    return (known.status == COMPLETE) | ((known.status == OPEN) & (known.rule.phase == ACCEPTED))


def available(known: CandidateState, pool: Pool, target: int, pool_size: int) -> Array:
    """Returns the number of samples that each candidate can launch now, i32[P]."""
    allowed = (known.status == OPEN) & (pool.entry < pool_size)
    if target:
        allowed &= before(accepted(known)) < target
    return jnp.where(allowed, known.want - known.counts.launched, 0)


def start_of(prompts: Prompts, prompt: Array, index: Array) -> Array:
    """Returns the number of context tokens from which a sample starts, i32 of `prompt`'s shape."""
    if prompts.prefixes is None:
        return prompts.lengths[prompt]
    return prompts.prefixes.prompt_length[prompt] + prompts.prefixes.length[prompt, index]


def whole_responses(
    prompts: Prompts, prompt: Array, index: Array, tokens: Array, lengths: Array
) -> tuple[Array, Array]:
    """Puts the replayed prefix before responses: (tokens i32[n, T], lengths i32[n]). Rows of length
    0 stay empty.
    """
    if prompts.prefixes is None:
        return tokens, lengths
    cut = prompts.prefixes.length[prompt, index][:, None]
    at = jnp.arange(tokens.shape[1])
    place = jnp.minimum(
        prompts.prefixes.prompt_length[prompt][:, None] + at, prompts.tokens.shape[1] - 1
    )
    whole = jnp.where(at < cut, prompts.tokens[prompt[:, None], place], behind(tokens, cut))
    lengths = jnp.where(lengths > 0, lengths + cut[:, 0], 0)
    return jnp.where(at < lengths[:, None], whole, 0), lengths


def behind(x: Array, cut: Array) -> Array:
    """Shifts x, [n, T], right by `cut`, i32[n, 1], and fills with zeros."""
    at = jnp.arange(x.shape[1])
    return jnp.where(
        at >= cut, jnp.take_along_axis(x, jnp.clip(at - cut, 0, x.shape[1] - 1), axis=1), 0
    )


class Launched(NamedTuple):
    """The part of the state that `launch` changes. It is kept small, because `cond` may copy it."""

    slots: Slots
    keys: Array
    launched: Array
    start_step: Array
    waiting: Array  # i32[], samples that could start and have no slot


def launch(
    now: Launched,
    known: CandidateState,
    pool: Pool,
    prompts: Prompts,
    per_prompt: int,
    target: int,
    key: Array,
    step: Array,
) -> Launched:
    """Gives idle slots their next samples, and counts samples without a slot."""
    slots = now.slots
    candidates = known.status.shape[0]
    capacity = now.start_step.shape[0]
    spare = available(known, pool, target, pool.prompt.shape[0])
    continues = (known.rule.phase == ACCEPTED) | (known.rule.round > 0)
    order = jnp.concatenate([jnp.where(continues, spare, 0), jnp.where(continues, 0, spare)])
    total = jnp.cumsum(order)
    idle = slots.request == capacity
    rank = jnp.cumsum(idle, dtype=jnp.int32) - 1
    taken = idle & (rank < total[-1])
    place = jnp.minimum(
        jnp.searchsorted(total, rank, side="right", method="scan_unrolled"), 2 * candidates - 1
    )
    prompt = place % candidates
    index = rank - (total[place] - order[place]) + known.counts.launched[prompt]
    request = jnp.where(taken, prompt * per_prompt + index, slots.request)
    last = prompts.tokens[prompt, jnp.maximum(start_of(prompts, prompt, index) - 1, 0)]
    launched = known.counts.launched.at[jnp.where(taken, prompt, candidates)].add(1, mode="drop")
    start = now.start_step.at[jnp.where(taken, request, capacity)].set(step, mode="drop")
    slots = Slots(
        request=request,
        token=jnp.where(taken, last, slots.token),
        suffix_length=jnp.where(taken, 0, slots.suffix_length),
    )
    fresh = jax.random.key_data(request_keys(key, prompts.visit[prompt], index))
    keys = jnp.where(taken.reshape(-1, *(1,) * (fresh.ndim - 1)), fresh, now.keys)
    return Launched(slots, keys, launched, start, total[-1] - jnp.sum(taken, dtype=jnp.int32))


def judge(
    known: CandidateState, rule: Rule, prompt: Array, ended: Array, right: Array
) -> CandidateState:
    """Counts samples that ended, and lets the rule decide open candidates that have all the samples
    they want. Returns the candidates' new state.

    Args:
      prompt: i32[S], candidate of each slot. ended: bool[S], whether its sample ended. right:
        bool[S], whether it is correct.
    """
    candidates = known.status.shape[0]

    def add(x, which):
        return x.at[jnp.where(which, prompt, candidates)].add(1, mode="drop")

    counts = known.counts.replace(
        done=add(known.counts.done, ended), positive=add(known.counts.positive, ended & right)
    )
    asked = (
        (known.status == OPEN)
        & (counts.launched > 0)
        & (counts.done == counts.launched)
        & (counts.launched == known.want)
    )
    decision, rule_state = rule.decide(counts, known.rule)

    def keep(new, old):
        return jax.tree.map(lambda a, b: jnp.where(asked, a, b), new, old)

    return CandidateState(
        counts,
        keep(decision.want, known.want),
        keep(decision.status, known.status),
        keep(rule_state, known.rule),
    )


def settled(known: CandidateState, count: Array, target: int) -> tuple[Array, Array]:
    """Returns (number of consumed candidates i32[], whether the loop is finished bool[])."""
    candidates = known.status.shape[0]
    at = jnp.arange(candidates)
    undecided = (known.status == OPEN) & (at < count)
    prefix = jnp.where(undecided.any(), jnp.argmax(undecided), count).astype(jnp.int32)
    if not target:
        return prefix, prefix == count
    complete = (known.status == COMPLETE) & (at < prefix)
    enough = jnp.sum(complete) >= target
    # One after the index of the target-th complete group.
    last = jnp.argmax(jnp.cumsum(complete) >= target) + 1
    return jnp.where(enough, last, prefix).astype(jnp.int32), enough | (prefix == count)


def make_load(decoder: Decoder, params: Any, prompts: Prompts, chunk: int, pool_size: int):
    """Returns two functions and an empty pool: load(pool, status) prefills the next `chunk`
    candidates into free entries; room(pool, status) returns whether enough entries are free.
    """
    candidates = prompts.tokens.shape[0]

    def free(pool: Pool, status: Array) -> Array:
        return (pool.prompt == candidates) | (
            status[jnp.minimum(pool.prompt, candidates - 1)] != OPEN
        )

    def load(pool: Pool, status: Array) -> Pool:
        entries = jnp.nonzero(free(pool, status), size=chunk, fill_value=pool_size)[0].astype(
            jnp.int32
        )
        new = pool.loaded + jnp.arange(chunk, dtype=jnp.int32)
        fits = (new < prompts.count) & (entries < pool_size)
        row = jnp.minimum(new, candidates - 1)
        kv = call_prefill(decoder, params, prompts.tokens[row], prompts.lengths[row])
        entries = jnp.where(fits, entries, pool_size)
        drop = jnp.where(fits, new, candidates)
        # The entry's previous candidate is decided. Its place is cleared, so that it launches no
        # sample from another candidate's context.
        old = jnp.where(
            entries < pool_size, pool.prompt[jnp.minimum(entries, pool_size - 1)], candidates
        )
        place = pool.entry.at[old].set(pool_size, mode="drop").at[drop].set(entries, mode="drop")
        return Pool(
            kv=jax.tree.map(lambda a, b: a.at[entries].set(b, mode="drop"), pool.kv, kv),
            prompt=pool.prompt.at[entries].set(new, mode="drop"),
            entry=place,
            loaded=pool.loaded + jnp.sum(fits, dtype=jnp.int32),
        )

    def room(pool: Pool, status: Array) -> Array:
        return jnp.sum(free(pool, status)) >= jnp.minimum(chunk, prompts.count - pool.loaded)

    shapes = jax.eval_shape(
        lambda: call_prefill(decoder, params, prompts.tokens[:chunk], prompts.lengths[:chunk])
    )
    empty = Pool(
        kv=jax.tree.map(lambda x: jnp.zeros((pool_size, *x.shape[1:]), x.dtype), shapes),
        prompt=jnp.full((pool_size,), candidates, jnp.int32),
        entry=jnp.full((candidates,), pool_size, jnp.int32),
        loaded=jnp.int32(0),
    )
    return load, room, empty


def check_prompts(prompts: Prompts, rule: Rule, target: int, config: SamplerConfig) -> None:
    """Raises ValueError, naming the field, if shapes or settings disagree."""
    size = prompts.lengths.shape
    if (
        prompts.tokens.ndim != 2
        or len(size) != 1
        or prompts.tokens.shape[:1] != size
        or prompts.visit.shape != size
    ):
        raise ValueError(
            f"Prompts.tokens must be [P, L], lengths and visit [P]; got {prompts.tokens.shape}, "
            f"{size}, {prompts.visit.shape}"
        )
    for leaf in jax.tree.leaves(prompts.answer):
        if leaf.shape[:1] != size:
            raise ValueError(
                f"every array of Prompts.answer must have {size[0]} rows, got shape {leaf.shape}"
            )
    if prompts.prefixes is not None:
        of = prompts.prefixes
        samples = (*size, rule.max_samples)
        if (
            of.prompt_length.shape != size
            or of.length.shape != samples
            or of.max_new.shape != samples
        ):
            raise ValueError(
                f"Prompts.prefixes must have prompt_length {size}, length and max_new {samples}; "
                f"got {of.prompt_length.shape}, {of.length.shape}, {of.max_new.shape}"
            )
    if target < 0:
        raise ValueError(f"target must be 0 (all candidates) or more, got {target}")
    if config.truncates or config.temperature == 0:
        raise ValueError(
            "sample_adaptive draws training samples: set SamplerConfig.temperature above 0, "
            f"top_k=0 and top_p=1; got {config.temperature}, {config.top_k} and {config.top_p}"
        )


@checked(check_prefixes)
@raising
@functools.partial(
    jax.jit, static_argnames=("decoder", "rule", "verify", "target", "config", "surplus")
)
def sample_adaptive(
    decoder: Decoder,
    params: Any,
    prompts: Prompts,
    rule: Rule,
    verify: Verify,
    target: int,
    key: Array,
    config: SamplerConfig,
    surplus: str = "discard",
) -> tuple[AdaptiveSamples, Counts]:
    """Draws the samples that the rule wants for each candidate, until `target` groups are complete.

    For any number of slots, the groups are the first `target` complete ones that result from
    running the rule prompt by prompt in launch order. Compiles once per (decoder, rule, verify,
    target, config, shapes).

    Args:
      decoder: the policy; static.
      params: its weights, before `prepare`.
      prompts: the candidates, in launch order.
      rule: the sampling rule; static.
      verify: static, jittable: (tokens i32[S, T], lengths i32[S], answer pytree of [S, ...]) ->
        rewards f32[S]. A sample is correct if its reward is above one half. Rows of length 0 did
        not end in this step and are ignored. Use a frozen dataclass or a module-level function: a
        new lambda compiles again. Wrap a Python function in `HostVerify`.
      target: number of complete groups to return, static; 0 decides all candidates.
      key: typed PRNG key of the run, the same in every step.
      config: static. `slots` rows decode; `context_pool` and `prefill_chunk` bound the prompts' KV.
      surplus: "discard" zeroes samples after the last group. "keep" returns them, for off-policy
        use in later steps; how many there are depends on the number of slots.

    Returns:
      (samples, counts i32[P] each). See `AdaptiveSamples`.

    Raises:
      ValueError: shapes or settings disagree.
      TypeError: the verifier or a decoder function returns a wrong type, or the key is not a typed
        key.
      VerifierError: a `HostVerify` failed; raised after the program ends.
    Source: SPEED-RL (arXiv 2506.09016), Algorithm 1.
    """
    check_prompts(prompts, rule, target, config)
    check_decisions(rule)
    check_key(key)
    # Device tables are clipped, so that every response fits its row.
    if (of := prompts.prefixes) is not None:
        length = jnp.clip(of.length, 0, config.max_new - 1)
        prompts = prompts.replace(
            prefixes=of.replace(
                length=length, max_new=jnp.clip(of.max_new, 1, config.max_new - length)
            )
        )
    if surplus not in ("discard", "keep"):
        raise ValueError(f'surplus must be "discard" or "keep", got {surplus!r}')
    candidates = prompts.lengths.shape[0]
    per_prompt = rule.max_samples
    capacity = candidates * per_prompt
    pool_size = min(config.context_pool or candidates, candidates)
    chunk = min(config.prefill_chunk or pool_size, pool_size)
    params = decoder.prepare(params)
    load, room, pool = make_load(decoder, params, prompts, chunk, pool_size)
    if chunk == pool_size == candidates:  # all at once, before the loop
        pool = load(pool, jnp.full((candidates,), OPEN, jnp.int32))
    no_keys = jax.eval_shape(
        lambda: jax.random.key_data(request_keys(key, *jnp.zeros((2, config.slots), jnp.int32)))
    )
    zeros = jnp.zeros((candidates,), jnp.int32)
    rule_state = rule.init(candidates, prompts.budget)
    counts = Counts(launched=zeros, done=zeros, positive=zeros)
    first, rule_state = rule.decide(counts, rule_state)
    used = jnp.arange(candidates) < prompts.count
    known = CandidateState(
        counts, jnp.where(used, first.want, 0), jnp.full((candidates,), OPEN, jnp.int32), rule_state
    )

    def prefill_more(pool: Pool, known: CandidateState, idle: Array) -> Pool:
        def needed(pool: Pool):
            waiting = jnp.sum(available(known, pool, target, pool_size))
            useful = (waiting < idle) & (pool.loaded < prompts.count) & room(pool, known.status)
            # Loaded candidates come before others in launch order: if `target` of them are
            # accepted, no other can start.
            return useful & (jnp.sum(accepted(known)) < target) if target else useful

        with jax.named_scope("prefill"):
            return jax.lax.while_loop(needed, lambda pool: load(pool, known.status), pool)

    def body(state: State) -> State:
        idle = jnp.sum(state.slots.request == capacity)
        pool = state.pool
        if pool_size < candidates or chunk < pool_size:
            pool = jax.lax.cond(
                (idle > 0) & (pool.loaded < prompts.count),
                lambda p: prefill_more(p, state.known, idle),
                lambda p: p,
                pool,
            )
        now = Launched(
            state.slots,
            state.keys,
            state.known.counts.launched,
            state.samples.start_step,
            jnp.int32(0),
        )
        now = jax.lax.cond(
            idle > 0,
            lambda now: launch(
                now,
                state.known,
                pool,
                prompts=prompts,
                per_prompt=per_prompt,
                target=target,
                key=key,
                step=state.samples.decode_steps,
            ),
            lambda now: now._replace(
                waiting=jnp.sum(available(state.known, pool, target, pool_size))
            ),
            now,
        )
        slots = now.slots
        waiting = now.waiting
        known = state.known._replace(counts=state.known.counts.replace(launched=now.launched))
        row = jnp.minimum(slots.request, capacity - 1)
        prompt = row // per_prompt
        index = row % per_prompt
        of = prompts.prefixes
        limit = (
            jnp.full(row.shape, config.max_new, jnp.int32)
            if of is None
            else of.max_new[prompt, index]
        )
        mine = SlotRequests(
            context=jnp.minimum(pool.entry[prompt], pool_size - 1),
            context_length=start_of(prompts, prompt, index),
            max_new=limit,
            key=jax.random.wrap_key_data(now.keys, impl=jax.random.key_impl(key)),
        )
        busy = jnp.sum(slots.request < capacity, dtype=jnp.int32)
        slots, cache, samples, ended = decode_one(
            decoder,
            params,
            pool.kv,
            cache=state.cache,
            slots=slots,
            samples=state.samples.replace(start_step=now.start_step),
            mine=mine,
            config=config,
        )

        def score(rewards: Array, known: CandidateState) -> tuple[Array, CandidateState, Array]:
            with jax.named_scope("verify"):
                answer = jax.tree.map(lambda x: x[prompt], prompts.answer)
                broken = samples.nonfinite[row]
                lengths = jnp.where(ended & ~broken, samples.lengths[row], 0)
                responses = whole_responses(prompts, prompt, index, samples.tokens[row], lengths)
                reward_S = jnp.where(ended & broken, 0.0, call_verify(verify, *responses, answer))
            rewards = rewards.at[jnp.where(ended, row, capacity)].set(reward_S, mode="drop")
            known = judge(known, rule, prompt, ended, reward_S > 0.5)
            going = ~settled(known, prompts.count, target)[1]
            if isinstance(verify, HostVerify):  # after a failure no sample is verified
                going &= ~jnp.any(jnp.isnan(reward_S))
            return rewards, known, going

        rewards, known, going = jax.lax.cond(
            jnp.any(ended),
            score,
            lambda rewards, known: (rewards, known, state.going),
            state.rewards,
            known,
        )
        enough = (jnp.sum(known.status == COMPLETE) >= target) if target else jnp.bool_(False)
        # Also ends if no slot is busy: otherwise a rule that wants no more samples of an open
        # prompt would loop forever.
        return State(
            slots,
            now.keys,
            pool,
            cache=cache,
            samples=count_step(samples, busy, waiting > 0, config.slots),
            rewards=rewards,
            known=known,
            head_of_line=state.head_of_line + (enough & going),
            going=going & (busy > 0),
        )

    with jax.named_scope("adaptive_loop"):
        state = State(
            idle_slots(config.slots, capacity),
            jnp.zeros(no_keys.shape, no_keys.dtype),
            pool,
            cache=call_init_cache(decoder, config.slots, config.max_new),
            samples=no_samples(capacity, config.max_new),
            rewards=jnp.zeros((capacity,), jnp.float32),
            known=known,
            head_of_line=jnp.int32(0),
            going=prompts.count > 0,
        )
        state = jax.lax.while_loop(lambda s: s.going, body, state)
    return finish(state, prompts, per_prompt, target, surplus)


def finish(
    state: State, prompts: Prompts, per_prompt: int, target: int, surplus: str
) -> tuple[AdaptiveSamples, Counts]:
    """Makes the results: selects groups, and zeroes or keeps samples after the last group."""
    known = state.known
    samples = state.samples
    candidates = known.status.shape[0]
    consumed, _ = settled(known, prompts.count, target)
    kept = jnp.arange(candidates) < consumed
    complete = (known.status == COMPLETE) & kept
    selected = complete & (before(complete) < target) if target else complete
    kept_R = jnp.repeat(kept, per_prompt)
    wasted = jnp.sum(jnp.where(kept_R, 0, samples.lengths))
    rewards = state.rewards
    status = known.status
    counts = known.counts
    if surplus == "discard":

        def clear(x, keep):
            if not x.ndim:  # a counter of the loop
                return x
            return jnp.where(keep.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.zeros((), x.dtype))

        samples, rewards = jax.tree.map(lambda x: clear(x, kept_R), (samples, rewards))
        counts, status = jax.tree.map(lambda x: clear(x, kept), (counts, status))
    prefix = None
    if prompts.prefixes is not None:
        row = jnp.arange(candidates * per_prompt)
        tokens, lengths = whole_responses(
            prompts, row // per_prompt, row % per_prompt, samples.tokens, samples.lengths
        )
        prefix = jnp.where(lengths > 0, lengths - samples.lengths, 0)
        samples = samples.replace(
            tokens=tokens, lengths=lengths, logprobs=behind(samples.logprobs, prefix[:, None])
        )
    missing = (
        jnp.maximum(target - jnp.sum(selected, dtype=jnp.int32), 0) if target else jnp.int32(0)
    )
    return AdaptiveSamples(
        **vars(samples),
        rewards=rewards,
        status=status,
        selected=selected,
        consumed=consumed,
        missing=missing,
        wasted_tokens=wasted,
        head_of_line_steps=state.head_of_line,
        prefix=prefix,
    ), counts
