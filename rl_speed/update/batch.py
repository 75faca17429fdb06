"""From groups to the arrays of one training batch."""

from collections.abc import Sequence

import numpy as np

from rl_speed.data.group import Group
from rl_speed.sampling.batch import Batch


def build_batch(groups: Sequence[Group], rows: int, width: int, multiple: int = 0, mask_prefix: bool = True) -> Batch:
    """Lay the groups' samples out as `rows` rows of at most `width` tokens.

    Args:
      groups: at most `rows` samples in all; the rest of the rows is padding.
      width: longest row there can be, in tokens.
      multiple: if positive, rows are cut to the smallest multiple of it that holds the longest (a few shapes, hence a few
        compilations, instead of always paying for the longest).
      mask_prefix: replayed tokens are no part of the mask. Otherwise they are, with behaviour log-probs NaN: nobody sampled them.

    Raises:
      ValueError: too many samples, or a row longer than `width`.
    """
    count = sum(len(g) for g in groups)
    if count > rows:
        raise ValueError(f"{count} samples do not fit into a batch of {rows} rows")
    longest = max((len(g.prompt.tokens) + int(g.lengths.max()) for g in groups if len(g)), default=2)
    if longest > width:
        raise ValueError(f"a row has {longest} tokens; the batch holds {width}")
    if multiple:
        width = min(width, -(-longest // multiple) * multiple)
    tokens = np.zeros((rows, width), np.int32)
    mask = np.zeros((rows, width - 1), bool)
    behaviour = np.zeros((rows, width - 1), np.float32)
    rewards = np.zeros((rows,), np.float32)
    group_ids = np.full((rows,), -1, np.int32)
    first = 0
    for index, group in enumerate(groups):
        start, block = len(group.prompt.tokens), slice(first, first + len(group))
        room = min(group.tokens.shape[1], width - start)
        valid = np.arange(room) < group.lengths[:, None]
        tokens[block, :start] = group.prompt.tokens
        tokens[block, start:start + room] = np.where(valid, group.tokens[:, :room], 0)
        replayed = np.arange(room) < group.prefix[:, None]
        mask[block, start - 1:start - 1 + room] = valid & ~replayed if mask_prefix else valid
        logprobs = np.where(replayed, 0.0 if mask_prefix else np.nan, group.logprobs[:, :room])
        behaviour[block, start - 1:start - 1 + room] = np.where(valid, logprobs, 0.0)
        rewards[block], group_ids[block] = group.rewards, index
        first = block.stop
    return Batch(tokens=tokens, mask=mask, behaviour_logprobs=behaviour, rewards=rewards, group_ids=group_ids)


def split_groups(groups: Sequence[Group], parts: int) -> list[list[int]]:
    """Indices of groups per mini-batch, in turn, so that no part is empty before another has two more."""
    return [list(range(part, len(groups), parts)) for part in range(parts)]
