r"""Pieces of LaTeX that both gold answers (`data/gold.py`) and responses (`rewards/grading.py`) are
made of. Standard library only: the workers that judge responses import it.
"""

import re

_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace opens nothing
# \frac whose arguments TeX takes without braces, one of them a letter that is a command:
# \frac \pi4.
_LETTER = r"\\(?:pi|theta|phi|alpha|beta|gamma|delta|lambda|mu|omega|sigma|tau)"
_BARE_FRACTION = re.compile(
    rf"\\([dt]?frac)\s*(?:({_LETTER})\s*({_LETTER}|\w)|(\w)\s*({_LETTER}))(?![A-Za-z{{\[])"
)


def closing_brace(text: str, start: int) -> int | None:
    """Where the brace closes that was opened just before `start`; None where it does not."""
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None


def braced_fractions(text: str) -> str:
    r"""\frac \pi4 as \frac{\pi}{4}: math-verify reads the former as nothing at all,
    and what is left of an answer as the answer.
    """
    return _BARE_FRACTION.sub(lambda m: rf"\{m[1]}{{{m[2] or m[4]}}}{{{m[3] or m[5]}}}", text)
