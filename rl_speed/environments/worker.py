"""Calls an environment's function in a worker of `rewards.pool.WorkerPool`. Standard library
only.
"""

import dataclasses
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from rl_speed.environments import Reply, Trajectory


@functools.cache
def _load(function: str) -> tuple[Callable[..., Any], bool]:
    """Returns a function, and whether it has a parameter `correct`."""
    module, _, attribute = function.partition(":")
    target = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    if not callable(target):
        raise ValueError(f"it is {target!r:.60}, which is not callable")
    if inspect.iscoroutinefunction(target):
        raise ValueError("it is an `async def`; make it a plain function")
    given = {"correct"} & set(inspect.signature(target).parameters)
    inspect.signature(target).bind(None, **dict.fromkeys(given))
    return target, bool(given)


def call(
    function: str, trajectory: Mapping[str, Any] | None = None, correct: bool | None = None
) -> tuple[float, str, str]:
    """Returns (0, "ok", the reply as JSON).

    Args:
      trajectory: fields of `Trajectory`; None: tries the function's form, and returns whether it
        takes a verdict.
      correct: the verdict, for a function that takes it.
    """
    target, takes = _load(function)
    if trajectory is None:
        return 0.0, "ok", json.dumps(takes)
    made = Trajectory(**trajectory)
    reply = target(made, correct=correct) if takes else target(made)
    if isinstance(reply, str):
        reply = Reply(reply)
    elif reply is None:
        reply = Reply(done=True)
    elif not isinstance(reply, Reply):
        raise TypeError(f"it returned {reply!r:.60}: return a Reply, a text, or None for the end")
    return 0.0, "ok", json.dumps(dataclasses.asdict(reply))
