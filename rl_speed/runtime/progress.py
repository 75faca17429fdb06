"""Progress bars that suit a terminal and stay short in a log file."""

import sys
from typing import Any

from tqdm.auto import tqdm


def progress_bar(total: int, label: str, initial: int = 0, enabled: bool = True) -> Any:
    """A tqdm bar; where standard error is no terminal it speaks every 20 seconds only."""
    terminal = sys.stderr.isatty()
    return tqdm(
        total=total,
        initial=initial,
        desc=label,
        disable=not enabled,
        dynamic_ncols=terminal,
        ncols=None if terminal else 120,
        mininterval=0.5 if terminal else 20,
        miniters=None if terminal else 1,
        ascii=not terminal,
    )
