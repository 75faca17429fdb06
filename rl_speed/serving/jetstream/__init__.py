"""Serving with JetStream: an engine with its interface, its orchestrator and its gRPC server. Its
authors archived it; README.md of serving lists its problems.

JetStream is the package `google-jetstream`, in the extra `rl_speed[jetstream]`. Only the modules
here import it.
"""

import contextlib
import logging
import os
from collections.abc import Iterator

MISSING = (
    "protocol jetstream needs JetStream: pip install 'rl_speed[jetstream]' (the package "
    "google-jetstream; the one called jetstream on PyPI is another tool)"
)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context for importing JetStream: restores logging, and raises an ImportError that says what
    to install.
    """
    root = logging.getLogger()
    level = root.level
    handlers = list(root.handlers)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{MISSING}; {error}") from error
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
