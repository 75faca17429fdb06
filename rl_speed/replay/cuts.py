"""Where samples start in a cached response, and how many tokens they may add (RPO: replay of
partial reasoning).
"""

import dataclasses

import numpy as np

from rl_speed.replay.responses import CachedResponse

# RNG stream id of cuts with (seed, visit). Not 0: NumPy pads seeds with zeros.
_CUTS = 2


@dataclasses.dataclass(frozen=True)
class Replay:
    """A prefix to start from: response tokens i32[k]; for each sample, how many of them it starts
    with, and how many tokens it may add, i32[count] each.
    """

    tokens: np.ndarray
    prefix: np.ndarray
    max_new: np.ndarray


@dataclasses.dataclass(frozen=True)
class PrefixConfig:
    """How prefixes are cut.

    Attributes:
      window: L: "fixed", `length` tokens; "half_min" or "min", half (rounded down) or all of the
        shortest response in the cached response's group.
      length: L of "fixed", in tokens.
      per_sample: every sample draws its own cut; False: one cut for all samples of a visit (the
        default of RPO, as released).
      max_response: most tokens of prefix and suffix together. max_new: most tokens of a suffix.
      released_budget: a suffix also has at most as many tokens as were cut off, as in the released
        code: lengths cannot grow then.
    """

    window: str
    length: int
    per_sample: bool
    max_response: int
    max_new: int
    seed: int = 0
    released_budget: bool = False


def cuts(
    config: PrefixConfig, cached: CachedResponse | None, visit: int, count_first: int, count: int
) -> np.ndarray:
    """Tokens kept for samples `count_first` to `count_first + count - 1` of a visit: len - m, m ~
    U{0..L}, clipped to the allowed range.

    A cut never keeps the end token of the response, and leaves room for at least one new token
    within `max_response`. So in a response that ended, m = 0 and m = 1 make the same cut. Ours: the
    paper's m = 0 leaves nothing to sample. A sample's draw is keyed by (seed, visit, its index).

    Returns: i32[count]; zeros without a cached response.
    Source: Yi et al., section 3.1.
    """
    if cached is None:
        return np.zeros((count,), np.int32)
    length = len(cached.tokens)
    usable = min(length - (not cached.truncated), config.max_response - 1)
    window = {"fixed": config.length, "half_min": cached.shortest // 2, "min": cached.shortest}[
        config.window
    ]
    # One stream of draws per visit, with draw i for sample i: cheaper than a generator per sample,
    # and as independent of calls.
    rng = np.random.default_rng([config.seed, visit, _CUTS])
    if config.per_sample:
        m = rng.integers(0, window, size=count_first + count, endpoint=True)[count_first:]
    else:
        m = np.full((count,), rng.integers(0, window, endpoint=True))
    return np.clip(length - m, 0, usable).astype(np.int32)


def suffix_budget(
    config: PrefixConfig, prefix: np.ndarray | int, cached: CachedResponse | None = None
) -> np.ndarray:
    """Tokens that may follow prefixes of `prefix` tokens, i32 of their shape: max_new or what
    max_response leaves, and at least 1.

    `cached`, the response that was cut, is used only with `released_budget`.
    """
    budget = np.minimum(config.max_new, config.max_response - np.asarray(prefix, np.int32))
    if config.released_budget and cached is not None:
        budget = np.minimum(budget, len(cached.tokens) - np.asarray(prefix, np.int32))
    return np.maximum(budget, 1).astype(np.int32)
