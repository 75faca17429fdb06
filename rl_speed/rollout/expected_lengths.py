"""Expected tokens of a sample, by which a call decides whose samples start first."""

import json
from typing import Any

import numpy as np

from rl_speed.data.prompts import Prompt
from rl_speed.data.rollouts import Rollouts

# Decay of the sums at each call, because lengths change as a policy learns.
KEPT = 0.9


class ExpectedLengths:
    """Mean lengths by class of prompt (`meta["class"]`, one class where there is none)."""

    def __init__(self):
        self._sums: dict[str, tuple[float, float]] = {}  # class -> (tokens, samples)

    def of(self, prompt: Prompt, group: Rollouts | None) -> float:
        """Expected tokens of the prompt's next sample; `group`: the prompt's samples so far.

        Infinite (served first) for a class without samples.
        """
        sums = self._sums.get(_class(prompt))
        if group is None:
            return sums[0] / sums[1] if sums else float("inf")
        # Adds the class mean as one more sample, so that it matters for prompts with few samples.
        own = (group.lengths - group.prefix).tolist() + ([sums[0] / sums[1]] if sums else [])
        return sum(own) / len(own)

    def observe(self, rollouts: Rollouts) -> None:
        """Adds the samples of one call."""
        self._sums = {name: (t * KEPT, n * KEPT) for name, (t, n) in self._sums.items()}
        new = rollouts.lengths - rollouts.prefix
        classes = [_class(p) for p in rollouts.prompts]
        for name in dict.fromkeys(classes):
            mine = np.asarray([c == name for c in classes])[rollouts.owner]
            tokens, samples = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = tokens + float(new[mine].sum()), samples + float(mine.sum())

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`."""
        return {
            "classes": json.dumps(list(self._sums)),
            "sums": np.array([*self._sums.values()]).reshape(-1, 2),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        names = json.loads(state["classes"])
        sums = np.asarray(state["sums"])
        self._sums = dict(zip(names, map(tuple, sums.tolist()), strict=True))


def _class(prompt: Prompt) -> str:
    return str(prompt.meta.get("class", ""))
