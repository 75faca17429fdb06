"""Serving a policy with JetStream: an engine over the policy's pure functions,
behind JetStream's orchestrator and gRPC server.

JetStream is the package `google-jetstream`, which comes with the extra `rl_speed[jetstream]` and is
imported when a name that needs it is first used: `PolicyEngine`, `Server`, `ask`. Nothing else of
rl_speed imports it.
"""

import importlib
from typing import Any

from rl_speed.serving.policy import ServedPolicy, load_policy
from rl_speed.serving.text import TextStream

_HOMES = {"PolicyEngine": "engine", "Server": "server", "Refusal": "client", "ask": "client"}

__all__ = ["PolicyEngine", "Refusal", "ServedPolicy", "Server", "TextStream", "ask", "load_policy"]


def __getattr__(name: str) -> Any:
    """Names that need JetStream.

    Raises ImportError that says what to install where it is missing.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
