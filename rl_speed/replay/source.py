"""The prefix source of RPO: where a sample starts, composed with any sampling rule."""

import dataclasses
from collections.abc import Iterable

from rl_speed.data.rollouts import Rollouts
from rl_speed.replay.cache import ReplayCache
from rl_speed.replay.cuts import PrefixConfig, Replay, cuts, suffix_budget
from rl_speed.replay.responses import CachedResponse


@dataclasses.dataclass(frozen=True)
class PrefixSource:
    """One cached response per prompt, and how prefixes are cut from it.

    A visit keeps the response it started with, even if the cache changes before it continues.
    """

    cache: ReplayCache
    config: PrefixConfig

    def remember(self, groups: Iterable[Rollouts]) -> None:
        """Updates the cache with all samples of finished visits, with the rewards that they are,
        or would be, trained on.
        """
        for group in groups:
            self.cache.update(group)

    def replay(self, cached: CachedResponse, visit: int, first: int, count: int) -> Replay:
        """Where samples `first` to `first + count - 1` of a visit start, and their token
        budgets.
        """
        prefix = cuts(self.config, cached, visit, first, count)
        # Tokens that no sample starts with need no prefill.
        return Replay(
            cached.tokens[: int(prefix.max(initial=0))],
            prefix,
            suffix_budget(self.config, prefix, cached),
        )
