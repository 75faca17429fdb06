"""The prefix source of RPO: gives samples their replayed prefixes, with any sampling rule."""

import dataclasses
from collections.abc import Iterable

from rl_speed.data.rollouts import Rollouts
from rl_speed.replay.cache import ReplayCache
from rl_speed.replay.cuts import PrefixConfig, Replay, cuts, suffix_budget
from rl_speed.replay.responses import CachedResponse


@dataclasses.dataclass(frozen=True)
class PrefixSource:
    """Cuts prefixes from a cache of one response per prompt.

    A visit keeps the cached response it started with, even if the cache changes before the visit
    continues.
    """

    cache: ReplayCache
    config: PrefixConfig

    def remember(self, groups: Iterable[Rollouts]) -> None:
        """Updates the cache with all samples of finished visits, trained on or not. Rewards must be
        the trained ones.
        """
        for group in groups:
            self.cache.update(group)

    def replay(self, cached: CachedResponse, visit: int, first: int, count: int) -> Replay:
        """Returns the prefixes and token limits of samples `first` to `first + count - 1` of a
        visit.
        """
        prefix = cuts(self.config, cached, visit, first, count)
        # Leaves out tokens that no sample starts with, which need no prefill.
        return Replay(
            cached.tokens[: int(prefix.max(initial=0))],
            prefix,
            suffix_budget(self.config, prefix, cached),
        )
