"""Reward functions of the user's own, named "module:function" in the configuration.

    def brevity(response: str, length: int) -> float:
        return -length / 1000

A function takes any of these by name, and returns a finite number (or (number, cause), to be
counted under a cause of its own):

    response: str      the text, without the end token
    question: str      as the data has it
    answer: str        the gold answer
    meta: dict         what else the data has (`Prompt.meta`)
    length: int        tokens, the end token included
    ended: bool        whether there was an end token

It runs in killable workers (`WorkerPool`), one response at a time: a hang, a crash, an exception or
running out of memory costs that response its value, which is then 0, and is counted. Its limit is
one of processor time; a function that waits for others, a server for example, is ended by the
wall-clock backstop alone, `config.reward.stall_s`. It may be called twice for a response. Its
module is found where Python finds modules, and in the working directory. It should not import JAX:
a worker that holds it is slow to start and large.
"""

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_speed.named import is_function
from rl_speed.rewards.call import FIELDS
from rl_speed.rewards.pool import CAUSES, UNGRADED, WorkerPool

_log = logging.getLogger(__name__)
_CALL = "rl_speed.rewards.call:call"


@dataclasses.dataclass(frozen=True)
class Extra:
    """A reward that is added to accuracy: `weight` times what `function` ("module:function")
    returns, logged as `name`.
    """

    function: str
    weight: float = 1.0

    @property
    def name(self) -> str:
        return self.function.rpartition(":")[2]


def parse_extra(text: str) -> list[Extra]:
    """The rewards that "module:function=weight, module:function" names;
    a weight that is left out is 1.

    Raises ValueError for what does not read so, a weight that is not finite, and two functions
    of one name.
    """
    found: list[Extra] = []
    for part in filter(None, map(str.strip, text.split(","))):
        function, equals, weight = (piece.strip() for piece in part.partition("="))
        try:
            extra = Extra(function, float(weight) if equals else 1.0)
        except ValueError:
            raise ValueError(f"{part!r}: {weight!r} is not a number") from None
        if not is_function(function):
            raise ValueError(f"{part!r} does not read module:function=weight")
        if not math.isfinite(extra.weight):
            raise ValueError(f"{part!r}: the weight must be finite")
        if any(extra.name == other.name for other in found):
            raise ValueError(
                f"two functions are called {extra.name!r}, and rewards are logged by name"
            )
        found.append(extra)
    return found


def check_functions(
    functions: Sequence[str], memory_limit_mb: int | None = 1024, timeout_s: float = 60.0
) -> None:
    """Raises ValueError naming the first function that cannot be used, and why;
    tried in a worker, as they will run.
    """
    with WorkerPool(
        "rl_speed.rewards.call:problem",
        1,
        timeout_s,
        memory_limit_mb=memory_limit_mb,
        start_timeout_s=timeout_s,
    ) as pool:
        for function in functions:
            (_,), (found,) = pool.score_detailed([(function,)])
            if found != "ok":
                if found in CAUSES:
                    found = f"importing it ended with: {found} ({pool.last_message.get(found, '')})"
                raise ValueError(f"the function {function!r} cannot be used: {found}")


class FunctionRewards:
    """Values of "module:function" for responses, from killable workers; a context manager.

    Attributes:
      counts: Counter of items by cause, as of `WorkerPool`. last_message: the latest detail seen
        for a cause.
    """

    fields = ("answer", "question", "meta")

    def __init__(
        self,
        functions: Sequence[str],
        workers: int,
        timeout_s: float = 5.0,
        memory_limit_mb: int | None = 1024,
        stall_s: float | None = None,
    ):
        """Starts nothing yet.

        Args: as of `WorkerPool`; timeout_s and stall_s are for one response and one function.
        """
        for function in functions:
            if not is_function(function):
                raise ValueError(f'a reward function is named "module:function", got {function!r}')
        self.functions = tuple(functions)
        # Modules may take longer to import than a response may take to judge.
        self._pool = WorkerPool(
            _CALL,
            workers,
            timeout_s,
            stall_s=stall_s,
            memory_limit_mb=memory_limit_mb,
            warm_up=tuple(("rl_speed.rewards.call:problem", (function,)) for function in functions),
        )

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    @property
    def counts(self):
        return self._pool.counts

    @property
    def last_message(self):
        return self._pool.last_message

    def close(self):
        """Ends the workers."""
        self._pool.close()

    def score(self, samples: Sequence[dict[str, Any]]) -> np.ndarray:
        """f32[functions, R]: every function's value of R responses, given by the fields above.

        What failed is 0, and counted.
        """
        return self.score_detailed(samples)[0]

    def score_detailed(
        self, samples: Sequence[dict[str, Any]]
    ) -> tuple[np.ndarray, list[list[str]]]:
        """As `score`, with the causes: (f32[functions, R], for each function R strings)."""
        for sample in samples:
            if missing := set(FIELDS) - set(sample):
                raise ValueError(f"a response without {', '.join(sorted(missing))}")
        values, causes = self._pool.score_detailed(
            [(function, sample) for function in self.functions for sample in samples]
        )
        size, by_function = len(samples), []
        for row, function in enumerate(self.functions):
            by_function.append(causes[row * size : (row + 1) * size])
            lost = {cause: n for cause in UNGRADED if (n := by_function[-1].count(cause))}
            if lost:
                _log.warning(
                    "%s: %s of %d responses, which get 0; the latest: %s",
                    function,
                    ", ".join(f"{n} ({cause})" for cause, n in lost.items()),
                    size,
                    "; ".join(self.last_message.get(cause, "") for cause in lost),
                )
        return values.reshape(len(self.functions), size), by_function

    def judge(self, samples: Sequence[dict[str, Any]]) -> tuple[np.ndarray, list[str]]:
        """(values f32[R], causes) of the first function, as the verifier
        (`rl_speed.rewards.scorer.Verifier`).
        """
        values, causes = self.score_detailed(samples)
        return values[0], causes[0]
