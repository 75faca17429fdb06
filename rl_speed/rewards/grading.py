"""Grading one response with the Math-Verify library: what `MathVerifier`'s workers run.

Imported by the workers only, at their start: so a missing library fails at once and by name, and
no item's time limit has to pay for the import.
"""

import functools
import logging
import re

from math_verify import parse, verify

# The library warns in every process that its own time limit is off, which is the point here.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# What makes the library look inside a text for LaTeX; anything else is taken as one expression.
_MARKUP = re.compile(r"\$[^$]+\$|(?<!\\)\\[(\[]|\\boxed|\\fbox")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace opens nothing
_BETWEEN_PARTS = re.compile(r"(?:[\s$,;&]|\\[\\,;:!()]|\\q?quad|\\text\{\s*(?:and|or)\s*\}|and|or)*")


def grade(
    response: str,
    gold: str,
    mode: str,
    float_rounding: int,
    strict: bool,
    allow_set_relation: bool,
):
    """Grades one response. Returns its value, or (value, cause); see `MathVerifier`."""
    gold_parsed, gold_is_mathematics = _parse_gold(gold)
    answer = response if mode == "free" else last_box(response)
    parsed = _parse(answer) if answer is not None else []
    equal = bool(parsed) and verify(
        gold_parsed,
        parsed,
        float_rounding=float_rounding,
        strict=strict,
        allow_set_relation_comp=allow_set_relation,
        timeout_seconds=None,
    )
    if not gold_is_mathematics:
        return float(equal), "gold_unparsable"
    if not parsed:
        return 0.0, "no_answer"
    return float(equal)


def last_box(text: str) -> str | None:
    r"""The last \boxed{...} or \fbox{...} of a text, as "\boxed{content}"; None if there is none.

    Boxes with nothing between them but a comma, "and" or the like are one answer of several parts;
    a box and its correction ("\boxed{1}, no: \boxed{2}") are not, though the library would join
    them. An open last box means that the response was cut inside its answer: an earlier box is
    then not what it meant to say.
    """
    contents, later_start = [], None
    for box in reversed(list(_BOX.finditer(text))):
        end = _closing_brace(text, box.end())
        if later_start is None and end is None:
            return None
        if later_start is not None and (
            end is None or not _BETWEEN_PARTS.fullmatch(text, end + 1, later_start)
        ):
            break
        contents.append(text[box.end() : end].strip())
        later_start = box.start()
    if not contents:
        return None
    return rf"\boxed{{{','.join(dict.fromkeys(reversed(contents)))}}}"


def _closing_brace(text, start):
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return brace.start()
    return None


@functools.lru_cache(maxsize=4096)  # a group's samples share one gold answer
def _parse_gold(gold):
    """Returns (candidates, whether any of them is a mathematical object rather than a string)."""
    if not _MARKUP.search(gold):
        # Left plain, "3\sqrt{13}" would be searched for a number and found to be 3. The library's
        # inline pattern does not cross lines; what dollar sign is left is a currency.
        gold = f"${' '.join(gold.replace('$', ' ').split())}$" if gold.strip() else ""
    parsed = _parse(gold)
    return parsed, any(not isinstance(candidate, str) for candidate in parsed)


def _parse(text):
    return parse(text, parsing_timeout=None)
