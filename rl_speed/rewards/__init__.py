"""Rewards of responses.

    MathVerifier       math-verify in killable worker processes (host)
    WorkerPool         the same workers for your own scoring function (host)
    FunctionRewards    your own functions by name, as in `config.reward` (host)
    ExactMatch         token equality, for the in-loop driver; pad_answers makes its arrays
    ScratchpadMatch    the results of written-out steps, likewise
    IntegerMatch       last boxed or last integer over token ids, for the in-loop driver;
                       token_bytes and encode_answers make its tables
    format_reward, language_reward, length_aware_reward    shaping

Names load on first use: the workers import this package, and must stay free of JAX.
"""

import importlib

_HOME = {
    "ExactMatch": "exact",
    "FunctionRewards": "custom",
    "IntegerMatch": "integer",
    "encode_answers": "integer",
    "pad_answers": "exact",
    "token_bytes": "integer",
    "MathVerifier": "math_verify",
    "ScratchpadMatch": "scratchpad",
    "WorkerPool": "pool",
    "format_reward": "format",
    "language_reward": "format",
    "length_aware_reward": "format",
}

__all__ = list(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__():
    return sorted([*globals(), *_HOME])
