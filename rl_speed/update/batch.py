"""From rollouts to the arrays of one training batch."""

import numpy as np

from rl_speed.data.rollouts import Rollouts
from rl_speed.sampling.batch import Batch


def build_batch(
    rollouts: Rollouts, rows: int, width: int, mask_prefix: bool = True, part: slice = slice(None)
) -> Batch:
    """Builds `rows` rows of `width` tokens from the samples; group ids are the samples' owners.

    Args:
      rollouts: at most `rows` samples; the other rows are padding.
      part: rows to return: each of several processes builds its own.
      width: tokens of the longest possible row.
      mask_prefix: leave replayed tokens out of the mask. Otherwise they are in it, with NaN
        behaviour log-probs, because no policy of the run sampled them.

    Raises:
      ValueError: too many samples, or a row longer than `width`.
    """
    if len(rollouts) > rows:
        raise ValueError(
            f"{len(rollouts)} samples do not fit into a batch of {rows} rows (config.driver.groups "
            "x config.rule.n). Where the groups are of a checkpoint, resume with both of its run"
        )
    prompts = [prompt.tokens for prompt in rollouts.prompts]
    start = np.array([len(tokens) for tokens in prompts], int)[rollouts.owner]
    longest = int((start + rollouts.lengths).max(initial=2))
    if longest > width:
        raise ValueError(f"a row has {longest} tokens; the batch holds {width}")
    first, last, _ = part.indices(rows)
    here = slice(first, min(last, len(rollouts)))
    owner = rollouts.owner[here]
    rows = last - first
    start = start[here][:, None]
    end = start + rollouts.lengths[here][:, None]
    prefix = rollouts.prefix[here][:, None]
    at = np.arange(width)
    context = np.zeros((len(owner), width), np.int32)
    for row, tokens in enumerate(prompts[i] for i in owner):
        context[row, : len(tokens)] = tokens

    def shift(x):
        return np.take_along_axis(x, np.clip(at - start, 0, x.shape[1] - 1), axis=1)

    response = (at >= start) & (at < end)
    replayed = (at >= start) & (at < start + prefix)
    logprobs = np.where(
        replayed, np.float32(0.0 if mask_prefix else np.nan), shift(rollouts.logprobs[here])
    )

    def pad(x, otherwise=0):
        return np.pad(
            x, ((0, rows - len(x)),) + ((0, 0),) * (x.ndim - 1), constant_values=otherwise
        )

    return Batch(
        tokens=pad(
            np.where(response, shift(rollouts.tokens[here]), np.where(at < start, context, 0))
        ),
        mask=pad(response & ~replayed if mask_prefix else response)[:, 1:],
        behaviour_logprobs=pad(np.where(response, logprobs, np.float32(0)))[:, 1:],
        rewards=pad(rollouts.rewards[here]),
        group_ids=pad(owner, -1),
        lengths=pad(rollouts.lengths[here]),
    )
