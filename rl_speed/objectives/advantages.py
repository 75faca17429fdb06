"""Advantages: each sample's reward relative to its group or batch.

Every function takes flat arrays and returns f32[R]:

  rewards    f32[R]  one scalar per sample (any real or boolean dtype)
  group_ids  i32[R]  in [0, num_groups); any other value (by convention -1)
                     marks a padding row: its advantage is 0 and its reward,
                     also NaN, enters no mean
  num_groups int     static; groups may have any size, also zero

The rows of a group may be anywhere in the arrays. With an in-group baseline (`rloo`, `grpo`,
`dr_grpo`, `reinforce_pp(baseline=True)`) a group of equal rewards, or of one sample, gets exactly
0, with no NaN in value or gradient even at eps=0. For `reinforce` and `reinforce_pp()` the same
holds for a batch.

Each group's minimum is first subtracted from its rewards. This changes no advantage, and makes the
rewards of a constant group exactly zero. Otherwise the rounding error of the mean (in float32, the
mean of three rewards of 0.1 is not 0.1), divided by a std near zero, could be of order 1.

Sums per group are masked reductions over [R, G], which XLA fuses without storing an array of that
shape. Scatter-adds would add in another order in each run on a GPU.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class GroupStatistics(NamedTuple):
    """Statistics of the rewards of each group, each of shape [num_groups].

    count    i32  rows of the group, without padding
    mean     f32  0 for an empty group
    std      f32  sample standard deviation (ddof 1), 0 where count < 2
    constant bool True if all rewards are equal, also for groups of no or one
                  row; DAPO's filter keeps the groups with `~constant`
    """

    count: jax.Array
    mean: jax.Array
    std: jax.Array
    constant: jax.Array


class _Grouped(NamedTuple):
    """Rewards minus the minimum of their group, and helpers to sum by group."""

    valid_R: jax.Array
    members_RxG: jax.Array
    index_R: jax.Array  # group of each row, clipped into range for padding rows
    count_G: jax.Array  # i32
    low_G: jax.Array  # group minimum, 0 for empty groups
    spread_R: jax.Array  # reward - group minimum; 0 for padding rows

    def sum(self, x_R):
        return jnp.sum(jnp.where(self.members_RxG, x_R[:, None], 0.0), axis=0)

    def of_row(self, x_G):
        return x_G[self.index_R]


def _grouped(rewards, group_ids, num_groups) -> _Grouped:
    rewards = jnp.asarray(rewards)
    group_ids = jnp.asarray(group_ids)
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            "rewards and group_ids must be flat arrays of one length; got shapes "
            f"{rewards.shape} and {group_ids.shape}."
        )
    if num_groups < 1:
        raise ValueError(f"num_groups must be at least 1, got {num_groups}.")
    valid_R = (group_ids >= 0) & (group_ids < num_groups)
    rewards = jnp.where(valid_R, rewards.astype(jnp.float32), 0.0)
    members_RxG = group_ids[:, None] == jnp.arange(num_groups)
    count_G = jnp.sum(members_RxG, axis=0, dtype=jnp.int32)
    low_G = jnp.min(jnp.where(members_RxG, rewards[:, None], jnp.inf), axis=0, initial=jnp.inf)
    # The minimum cancels in every advantage, so it needs no gradient.
    low_G = jax.lax.stop_gradient(jnp.where(count_G > 0, low_G, 0.0))
    index_R = jnp.clip(group_ids, 0, num_groups - 1)
    spread_R = jnp.where(valid_R, rewards - low_G[index_R], 0.0)
    return _Grouped(valid_R, members_RxG, index_R, count_G, low_G, spread_R)


def _divide(numerator, denominator):
    """numerator / denominator; 0 with zero gradients if the denominator is 0."""
    positive = denominator > 0
    return jnp.where(positive, numerator / jnp.where(positive, denominator, 1.0), 0.0)


def _sqrt(x):
    """sqrt(x) whose gradient at 0 is 0 instead of infinite."""
    positive = x > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def _centred(groups: _Grouped):
    """Returns (rewards - group mean [R], group mean - group minimum [G])."""
    mean_G = _divide(groups.sum(groups.spread_R), groups.count_G.astype(jnp.float32))
    centred_R = jnp.where(groups.valid_R, groups.spread_R - groups.of_row(mean_G), 0.0)
    return centred_R, mean_G


def _std(groups: _Grouped, centred_R):
    squares_G = groups.sum(jnp.square(centred_R))
    return _sqrt(_divide(squares_G, (groups.count_G - 1).astype(jnp.float32)))


@functools.partial(jax.jit, static_argnames="num_groups")
def group_statistics(rewards, group_ids, num_groups: int) -> GroupStatistics:
    """Computes count, mean, sample std and `constant` of each group's rewards."""
    groups = _grouped(rewards, group_ids, num_groups)
    centred_R, mean_G = _centred(groups)
    # Exact: reward - minimum is zero only if they are equal.
    constant_G = ~jnp.any(groups.members_RxG & (groups.spread_R > 0)[:, None], axis=0)
    return GroupStatistics(
        groups.count_G, groups.low_G + mean_G, _std(groups, centred_R), constant_G
    )


@functools.partial(jax.jit, static_argnames="num_groups")
def rloo(rewards, group_ids, num_groups: int) -> jax.Array:
    """Leave-one-out advantage: r_i - the mean of the group's other rewards, f32[R].

    It equals n/(n-1) times `dr_grpo`, and its policy gradient is unbiased.
    Source: Ahmadian et al. 2024 (arXiv 2402.14740).
    """
    groups = _grouped(rewards, group_ids, num_groups)
    others_G = (groups.count_G - 1).astype(jnp.float32)
    total_R = groups.of_row(groups.sum(groups.spread_R))
    baseline_R = _divide(total_R - groups.spread_R, groups.of_row(others_G))
    keep_R = groups.valid_R & (groups.of_row(groups.count_G) > 1)
    return jnp.where(keep_R, groups.spread_R - baseline_R, 0.0)


@functools.partial(jax.jit, static_argnames="num_groups")
def grpo(rewards, group_ids, num_groups: int, eps=1e-6) -> jax.Array:
    """(r - group mean) / (group std + eps), std with ddof 1, f32[R].

    Source: DeepSeekMath (arXiv 2402.03300).
    """
    groups = _grouped(rewards, group_ids, num_groups)
    centred_R, _ = _centred(groups)
    return _divide(centred_R, groups.of_row(_std(groups, centred_R) + eps))


@functools.partial(jax.jit, static_argnames="num_groups")
def ngrpo(rewards, group_ids, num_groups: int, eps=1e-6, best=1.0) -> jax.Array:
    """`grpo` with one more reward per group in mean and std: `best`, the highest possible reward.

    A group with only wrong samples then has negative advantages; with only correct samples, 0.
    Source: NGRPO (Nan et al. 2025).
    """
    groups = _grouped(rewards, group_ids, num_groups)
    count_G = groups.count_G.astype(jnp.float32)
    best_G = best - groups.low_G
    mean_G = (groups.sum(groups.spread_R) + best_G) / (count_G + 1)
    centred_R = jnp.where(groups.valid_R, groups.spread_R - groups.of_row(mean_G), 0.0)
    squares_G = groups.sum(jnp.square(centred_R)) + jnp.square(best_G - mean_G)
    return _divide(centred_R, groups.of_row(_sqrt(_divide(squares_G, count_G)) + eps))


@functools.partial(jax.jit, static_argnames="num_groups")
def dr_grpo(rewards, group_ids, num_groups: int) -> jax.Array:
    """r - group mean, f32[R]. Source: Dr. GRPO (arXiv 2503.20783)."""
    return _centred(_grouped(rewards, group_ids, num_groups))[0]


@functools.partial(jax.jit, static_argnames="num_groups")
def reinforce(rewards, group_ids, num_groups: int) -> jax.Array:
    """r - batch mean over the rows that are not padding, f32[R].

    Group ids only mark padding, so groups of one sample, the usual setting, also learn.
    """
    group_ids = jnp.asarray(group_ids)
    valid_R = (group_ids >= 0) & (group_ids < num_groups)
    return dr_grpo(rewards, jnp.where(valid_R, 0, -1), 1)


@functools.partial(jax.jit, static_argnames=("num_groups", "baseline"))
def reinforce_pp(
    rewards, group_ids, num_groups: int, lengths=None, baseline: bool = False, eps=1e-8
) -> jax.Array:
    """REINFORCE++: advantages whitened over all valid tokens of the batch, f32[R].

    (a - mean) / (std + eps), with the population std (ddof 0), as released (OpenRLHF). All tokens
    of a sample have its advantage, so mean and std are over samples weighted by `lengths`.

    Args:
      lengths: [R], valid (unmasked) tokens of each row; None: every row counts once.
      baseline: subtract the group's mean first ("REINFORCE++-baseline"). Constant groups then get
        exactly 0, but count in the statistics. (Released code gives them -mean/std.)
      eps: added to the std; 0 is allowed.

    Source: Hu et al. (arXiv 2501.03262).
    """
    groups = _grouped(rewards, group_ids, num_groups)
    if baseline:
        raw_R, _ = _centred(groups)
        # False for groups of one row, too.
        signal_G = jnp.any(groups.members_RxG & (groups.spread_R > 0)[:, None], axis=0)
        keep_R = groups.valid_R & groups.of_row(signal_G)
    else:
        raw_R = jnp.where(groups.valid_R, jnp.asarray(rewards).astype(jnp.float32), 0.0)
        keep_R = groups.valid_R
    if lengths is None:
        weight_R = groups.valid_R.astype(jnp.float32)
    else:
        lengths = jnp.asarray(lengths)
        if lengths.shape != raw_R.shape:
            raise ValueError(
                f"lengths must have the shape of rewards, {raw_R.shape}; got {lengths.shape}."
            )
        weight_R = jnp.where(groups.valid_R, lengths.astype(jnp.float32), 0.0)
    counted_R = weight_R > 0
    # Subtracts the smallest counted value, for the reason in the module docstring.
    low = jnp.min(jnp.where(counted_R, raw_R, jnp.inf), initial=jnp.inf)
    low = jax.lax.stop_gradient(jnp.where(jnp.any(counted_R), low, 0.0))
    spread_R = jnp.where(groups.valid_R, raw_R - low, 0.0)
    total = jnp.sum(weight_R)
    centred_R = spread_R - _divide(jnp.sum(weight_R * spread_R), total)
    std = _sqrt(_divide(jnp.sum(weight_R * jnp.square(centred_R)), total))
    # A batch without spread gets 0, whatever eps is.
    white_R = jnp.where(std > 0, _divide(centred_R, std + eps), 0.0)
    return jnp.where(keep_R, white_R, 0.0)


# (rewards, group_ids, num_groups, trained tokens of each row i32[R]) -> advantages f32[R].
AdvantageFn = Callable[[jax.Array, jax.Array, int, jax.Array], jax.Array]

ADVANTAGES: dict[str, AdvantageFn] = {
    "rloo": lambda r, ids, g, n: rloo(r, ids, g),
    "grpo": lambda r, ids, g, n: grpo(r, ids, g),
    "ngrpo": lambda r, ids, g, n: ngrpo(r, ids, g),
    "dr_grpo": lambda r, ids, g, n: dr_grpo(r, ids, g),
    "reinforce": lambda r, ids, g, n: reinforce(r, ids, g),
    "reinforce_pp": lambda r, ids, g, n: reinforce_pp(r, ids, g, lengths=n),
    "reinforce_pp_baseline": lambda r, ids, g, n: reinforce_pp(r, ids, g, lengths=n, baseline=True),
}


def check_advantage(advantage: AdvantageFn) -> None:
    """Traces an advantage function on six samples of two groups, without computing anything.

    Raises ValueError: it does not accept the arguments of `AdvantageFn`, or does not return a float
    for each sample.
    """

    def column(dtype):
        return jax.ShapeDtypeStruct((6,), dtype)

    try:
        got = jax.eval_shape(
            lambda r, ids, n: advantage(r, ids, 2, n),
            column(jnp.float32),
            column(jnp.int32),
            column(jnp.int32),
        )
    except Exception as error:  # a function of the user's own may raise anything
        raise ValueError(
            "called with (rewards f32[6], group_ids i32[6], num_groups=2, lengths i32[6]), the "
            f"function raised {type(error).__name__}: {error}"
        ) from error
    if getattr(got, "shape", None) != (6,) or not jnp.issubdtype(got.dtype, jnp.floating):
        raise ValueError(
            f"an advantage function must return f32[6] for six samples; this one returned {got}"
        )
