"""From rollouts to the arrays of one training batch."""

import numpy as np

from rl_speed.data.rollouts import Rollouts
from rl_speed.sampling.batch import Batch


def build_batch(rollouts: Rollouts, rows: int, width: int, mask_prefix: bool = True) -> Batch:
    """Lay the samples out as `rows` rows of `width` tokens; group ids are the samples' owners.

    Args:
      rollouts: at most `rows` samples; the rest of the rows is padding.
      width: longest row there can be, in tokens.
      mask_prefix: replayed tokens are no part of the mask. Otherwise they are, with behaviour
        log-probs NaN: nobody sampled them.

    Raises:
      ValueError: too many samples, or a row longer than `width`.
    """
    if len(rollouts) > rows:
        raise ValueError(f"{len(rollouts)} samples do not fit into a batch of {rows} rows")
    prompts = [prompt.tokens for prompt in rollouts.prompts]
    start = np.array([len(tokens) for tokens in prompts], int)[rollouts.owner][:, None]
    end = start + rollouts.lengths[:, None]
    longest = int(end.max(initial=2))
    if longest > width:
        raise ValueError(f"a row has {longest} tokens; the batch holds {width}")
    at = np.arange(width)
    context = np.stack(
        [np.pad(tokens[:width], (0, max(width - len(tokens), 0))) for tokens in prompts]
    )[rollouts.owner]
    shift = lambda x: np.take_along_axis(x, np.clip(at - start, 0, x.shape[1] - 1), axis=1)
    response, replayed = (
        (at >= start) & (at < end),
        (at >= start) & (at < start + rollouts.prefix[:, None]),
    )
    logprobs = np.where(
        replayed, np.float32(0.0 if mask_prefix else np.nan), shift(rollouts.logprobs)
    )
    pad = lambda x, otherwise=0: np.pad(
        x, ((0, rows - len(x)),) + ((0, 0),) * (x.ndim - 1), constant_values=otherwise
    )
    return Batch(
        tokens=pad(np.where(response, shift(rollouts.tokens), np.where(at < start, context, 0))),
        mask=pad(response & ~replayed if mask_prefix else response)[:, 1:],
        behaviour_logprobs=pad(np.where(response, logprobs, np.float32(0)))[:, 1:],
        rewards=pad(rollouts.rewards),
        group_ids=pad(rollouts.owner, -1),
    )
