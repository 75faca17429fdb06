"""Serving with JetStream, which its authors archived: an engine behind its interface,
its orchestrator and gRPC server. See README.md of serving.

JetStream is the package `google-jetstream`, which comes with the extra `rl_speed[jetstream]`. The
modules here import it; nothing else does.
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
    """Import JetStream inside of this: logging stays as it was,
    and an ImportError says what to install.
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
