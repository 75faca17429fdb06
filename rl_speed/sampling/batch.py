"""From the samples of `sample_adaptive` to rows to train on, in the compiled program.

`training_batch` is the whole of it; `select` and `to_batch` are its two halves, for programs that
choose among a group's samples.
"""

import jax.numpy as jnp
from flax import struct

from rl_speed.sampling.types import AdaptiveSamples, Array, Counts, Prompts


@struct.dataclass
class Batch:
    """R samples as whole rows: prompt, then response, padded on the right.

    Padding rows have group_ids -1 and no mask.

    Column t of the [R, W - 1] arrays belongs to the token at t + 1, which is predicted at t.

    Attributes:
      tokens: i32[R, W].
      mask: bool[R, W - 1], True where the predicted token is one of the response's, and is
        trained on.
      behaviour_logprobs: f32[R, W - 1], by the policy that sampled, 0 elsewhere.
      rewards: f32[R]. group_ids: i32[R].
      lengths: i32[R], tokens of the whole response, what was replayed of it included; 0 for rows of
        padding. None: nobody asks for them.
    """

    tokens: Array
    mask: Array
    behaviour_logprobs: Array
    rewards: Array
    group_ids: Array
    lengths: Array | None = None


def select(samples: AdaptiveSamples, counts: Counts, target: int) -> Array:
    """Rows of the samples of the selected groups of one shard, in launch order: i32[target * N],
    N places to a group.

    A place whose sample was not drawn (a rule may stop short of N), or whose group is missing,
    holds the number of rows there are.
    """
    candidates = samples.selected.shape[0]
    rows = samples.lengths.shape[0]
    per_prompt = rows // candidates
    chosen = jnp.nonzero(samples.selected, size=target, fill_value=candidates)[0].astype(jnp.int32)[
        :, None
    ]
    index = jnp.arange(per_prompt, dtype=jnp.int32)
    drawn = (index < counts.done[jnp.minimum(chosen, candidates - 1)]) & (chosen < candidates)
    return jnp.where(drawn, chosen * per_prompt + index, rows).ravel()


def to_batch(
    samples: AdaptiveSamples,
    prompts: Prompts,
    rows: Array,
    group_ids: Array,
    width: int,
    mask_prefix: bool = True,
) -> Batch:
    """Lay samples of one shard out as whole rows, prompt then response; see `Batch`.

    Args:
      rows: i32[K], rows of `samples`. group_ids: i32[K], -1 for a row of padding, whatever its
        place in `rows`.
      mask_prefix: replayed tokens are no part of the mask. Otherwise they are, with behaviour
        log-probs NaN: nobody sampled them.
    """
    per_prompt = samples.lengths.shape[0] // prompts.lengths.shape[0]
    room = samples.tokens.shape[1]
    rows = jnp.minimum(rows, samples.lengths.shape[0] - 1)
    used = group_ids >= 0
    prompt = rows // per_prompt
    lengths = prompts.lengths if prompts.prefixes is None else prompts.prefixes.prompt_length
    start = lengths[prompt][:, None]
    length = samples.lengths[rows][:, None]
    context = prompts.tokens[prompt]
    at = jnp.arange(width)[None]
    from_context = jnp.take_along_axis(
        context, jnp.broadcast_to(jnp.minimum(at, context.shape[1] - 1), (len(rows), width)), axis=1
    )

    def from_response(x):
        return jnp.take_along_axis(x[rows], jnp.clip(at - start, 0, room - 1), axis=1)

    is_response = (at >= start) & (at < start + length) & used[:, None]
    tokens = jnp.where(
        is_response,
        from_response(samples.tokens),
        jnp.where((at < start) & used[:, None], from_context, 0),
    )
    mask = is_response
    behaviour = jnp.where(is_response, from_response(samples.logprobs), 0.0)
    if samples.prefix is not None:
        replayed = is_response & (at < start + samples.prefix[rows][:, None])
        if mask_prefix:
            mask = mask & ~replayed
        else:
            behaviour = jnp.where(replayed, jnp.nan, behaviour)
    return Batch(
        tokens=tokens,
        mask=mask[:, 1:],
        behaviour_logprobs=behaviour[:, 1:],
        rewards=jnp.where(used, samples.rewards[rows], 0.0),
        group_ids=group_ids,
        lengths=jnp.where(used, samples.lengths[rows], 0),
    )


def place_ids(samples: AdaptiveSamples, rows: Array) -> tuple[Array, Array]:
    """(group ids, index in the group) of the places of `select`, i32[K] each;
    ids -1 where there is nothing to train on.
    """
    available = samples.lengths.shape[0]
    per_prompt = available // samples.selected.shape[0]
    groups, index = jnp.divmod(jnp.arange(len(rows), dtype=jnp.int32), per_prompt)
    trainable = (rows < available) & ~samples.nonfinite[jnp.minimum(rows, available - 1)]
    return jnp.where(trainable, groups, -1), index


def training_batch(
    samples: AdaptiveSamples,
    counts: Counts,
    prompts: Prompts,
    target: int,
    width: int | None = None,
) -> Batch:
    """The groups that `sample_adaptive` selected, as rows to train on. Jittable.

    Where candidates ran out, the last `samples.missing` groups are padding: with no group at all
    the loss is 0 and so is its gradient, but an optimizer with momentum would still move: skip its
    step where `jnp.any(batch.mask)` is False. Samples that logits without a distribution ended
    (`nonfinite`) are padding, too.

    Args:
      samples, counts, prompts: what `sample_adaptive` returned, and the candidates that it took.
      target: groups, as `sample_adaptive` took it.
      width: static, tokens of a row. What lies behind is cut off; None has room for any prompt with
        any response.

    Returns: a `Batch` of R = target * max_samples rows, group ids in [0, target), for any policy.
    """
    width = prompts.tokens.shape[1] + samples.tokens.shape[1] if width is None else width
    rows = select(samples, counts, target)
    return to_batch(samples, prompts, rows, place_ids(samples, rows)[0], width)
