"""From the samples of `sample_adaptive` to rows to train on, in the compiled program.

`training_batch` is the whole of it; `select` and `to_batch` are its two halves, for programs that choose among a group's samples.
"""

import jax.numpy as jnp
from flax import struct

from rl_speed.sampling.types import AdaptiveSamples, Array, Counts, Prompts


@struct.dataclass
class Batch:
    """R samples as whole rows: prompt, then response, padded on the right. Padding rows have group_ids -1 and no mask.

    Column t of the [R, W - 1] arrays belongs to the token at t + 1, which is predicted at t.

    Attributes:
      tokens: i32[R, W].
      mask: bool[R, W - 1], True where the predicted token is one of the response's, and is trained on.
      behaviour_logprobs: f32[R, W - 1], by the policy that sampled, 0 elsewhere.
      rewards: f32[R]. group_ids: i32[R].
    """

    tokens: Array
    mask: Array
    behaviour_logprobs: Array
    rewards: Array
    group_ids: Array


@struct.dataclass
class Drawn:
    """The groups trained on, G in all over the shards and N samples each, shards one after the other.

    Attributes:
      candidate: i32[G], row of the shard's table; the number of rows for a group that is missing.
      tokens: i32[G, N, T]. logprobs: f32[G, N, T]. lengths: i32[G, N]. rewards: f32[G, N]. truncated: bool[G, N].
      used: bool[G, N], samples that were drawn (a rule may stop short of N). nonfinite: bool[G, N], those of them that logits
        without a distribution ended: they are no part of the batch, and say nothing about the others.
      prefix: i32[G, N], tokens at the start of each response that were replayed; None where nothing is.
    """

    candidate: Array
    tokens: Array
    logprobs: Array
    lengths: Array
    rewards: Array
    truncated: Array
    used: Array
    nonfinite: Array
    prefix: Array | None = None

    @property
    def trainable(self) -> Array:
        """bool[G, N]: drawn, to the end."""
        return self.used & ~self.nonfinite


def select(samples: AdaptiveSamples, counts: Counts, target: int, per_prompt: int) -> Drawn:
    """The selected groups of one shard, in launch order."""
    candidates = samples.selected.shape[0]
    chosen = jnp.nonzero(samples.selected, size=target, fill_value=candidates)[0].astype(jnp.int32)
    row = jnp.minimum(chosen, candidates - 1)
    take = lambda x: x.reshape(candidates, per_prompt, *x.shape[1:])[row]
    used = (jnp.arange(per_prompt) < counts.done[row][:, None]) & (chosen < candidates)[:, None]
    return Drawn(candidate=chosen, tokens=take(samples.tokens), logprobs=take(samples.logprobs), lengths=take(samples.lengths),
                 rewards=take(samples.rewards), truncated=take(samples.truncated), used=used,
                 nonfinite=take(samples.nonfinite),
                 prefix=None if samples.prefix is None else take(samples.prefix))


def to_batch(drawn: Drawn, prompts: Prompts, width: int, chosen: Array | None = None) -> Batch:
    """Lay the groups of one shard out as whole rows, prompt then response; see `Batch`. Group ids are those of the shard.

    `chosen`, i32[K], are the samples to lay out, counted over all groups, G x N where there is none; None: all of them.
    """
    groups, per_prompt, room = drawn.tokens.shape
    total = groups * per_prompt
    sample = jnp.arange(total) if chosen is None else jnp.minimum(chosen, total - 1)
    row = jnp.minimum(drawn.candidate, prompts.lengths.shape[0] - 1)[sample // per_prompt]
    whole = lambda x: x.reshape(total, *x.shape[2:])
    flat = whole if chosen is None else lambda x: whole(x)[sample]
    lengths = prompts.lengths if prompts.prefixes is None else prompts.prefixes.prompt_length
    start, context = lengths[row][:, None], prompts.tokens[row]
    length, used = flat(drawn.lengths)[:, None], flat(drawn.trainable)
    if chosen is not None:
        used &= chosen < total
    at = jnp.arange(width)[None]
    from_context = jnp.take_along_axis(context, jnp.broadcast_to(jnp.minimum(at, context.shape[1] - 1), (len(used), width)), axis=1)
    from_response = lambda x: jnp.take_along_axis(flat(x), jnp.clip(at - start, 0, room - 1), axis=1)
    is_response = (at >= start) & (at < start + length) & used[:, None]
    tokens = jnp.where(is_response, from_response(drawn.tokens), jnp.where((at < start) & used[:, None], from_context, 0))
    is_sampled = is_response if drawn.prefix is None else is_response & (at >= start + flat(drawn.prefix)[:, None])
    return Batch(tokens=tokens, mask=is_sampled[:, 1:],
                 behaviour_logprobs=jnp.where(is_response, from_response(drawn.logprobs), 0.0)[:, 1:],
                 rewards=jnp.where(used, flat(drawn.rewards), 0.0),
                 group_ids=jnp.where(used, (sample // per_prompt).astype(jnp.int32), -1))


def training_batch(samples: AdaptiveSamples, counts: Counts, prompts: Prompts, target: int, width: int | None = None) -> Batch:
    """The groups that `sample_adaptive` selected, as rows to train on. Jittable.

    Where candidates ran out, the last `samples.missing` groups are padding: with no group at all the loss is 0 and so is its
    gradient, but an optimizer with momentum would still move; skip its step then.

    Args:
      samples, counts, prompts: what `sample_adaptive` returned, and the candidates that it took.
      target: groups, as `sample_adaptive` took it.
      width: static, tokens of a row. What lies behind is cut off; None has room for any prompt with any response.

    Returns: a `Batch` of R = target * max_samples rows, group ids in [0, target), for any policy.
    """
    per_prompt = samples.lengths.shape[0] // prompts.lengths.shape[0]
    width = prompts.tokens.shape[1] + samples.tokens.shape[1] if width is None else width
    return to_batch(select(samples, counts, target, per_prompt), prompts, width)
