"""Calling a reward function of the user's own, by name:
what `rl_speed.rewards.custom`'s workers run.

Standard library only, as all that workers import.
"""

import functools
import importlib
import inspect
import re

FIELDS = ("response", "answer", "question", "meta", "length", "ended")


def call(function: str, fields: dict):
    """The function's value for one response; it gets the fields that it names."""
    target, names = _load(function)
    value = target(**(fields if names is None else {name: fields[name] for name in names}))
    # A cause becomes part of a metric's name.
    return (value[0], re.sub(r"[^\w.-]", "_", str(value[1]))) if isinstance(value, tuple) else value


def problem(function: str) -> tuple[float, str]:
    """(0, why the function cannot be used, or "ok")."""
    try:
        _load(function)
    except BaseException as error:  # a module may raise anything, or exit
        text = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return 0.0, text[:500] or type(error).__name__
    return 0.0, "ok"


@functools.cache
def _load(function):
    """(the function, the names of the fields it takes; None where it takes any)."""
    module, _, attribute = function.partition(":")
    target = functools.reduce(getattr, attribute.split("."), importlib.import_module(module))
    if not callable(target):
        raise ValueError(f"it is {target!r}, which cannot be called")
    names = []
    for name, p in inspect.signature(target).parameters.items():
        if p.kind is p.VAR_KEYWORD:
            return target, None
        if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY) or (
            name not in FIELDS and p.default is p.empty
        ):
            raise ValueError(
                f"its parameter {name!r} would get no value; what it may ask for, by name: "
                f"{', '.join(FIELDS)}"
            )
        if name in FIELDS:
            names.append(name)
    return target, tuple(names)
