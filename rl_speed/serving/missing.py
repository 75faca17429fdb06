"""What is said where JetStream is not installed."""

import contextlib
import logging
import os
from collections.abc import Iterator

MISSING = (
    "serving needs JetStream: pip install -e '.[jetstream]' in the checkout (the package "
    "google-jetstream; the one called jetstream on PyPI is another tool)"
)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import JetStream inside of this: logging stays as it was,
    and an ImportError says what to install.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{MISSING}; {error}") from error
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers
