r"""Converts published gold answers to the text that verifiers compare responses with."""

import ast
import contextlib
import json
import math
import re
from decimal import Decimal
from typing import Any

from rl_speed.answers import (
    arguments,
    braced_fractions,
    closing_brace,
    last_box,
    layout,
    separators,
    thousands,
)
from rl_speed.data.files import DataError

_INTEGER = re.compile(r"[-+]?\d+|[-+]?\d{1,3}(,\d{3})+|[-+]?\d+\.0+")
# Text that may separate the formulas of one answer.
_LIST = re.compile(r"(?:[\s,;.]|and|or)*")
# Answers that mean "there is none" in NuminaMath and its descendants.
NO_ANSWER = ("proof", "notfound", "not found")


def answer_text(value: Any, field: str) -> str:
    r"""Returns a row's answer as text, with formatting removed by `plain`.

    ", " joins the parts of a list (OlympiadBench's final_answer), also where a text writes one
    ('["36"]', a list that went through CSV or verl's ground_truth); 100,200 would be one number. If
    the answer has a box, the box's content is the answer. "$69$,$84$" becomes 69, 84, and AIME's
    "073" becomes 73.

    Raises:
      DataError: the value is empty, or is not text, a number, or a list of these.
    """
    if isinstance(value, str) and value.lstrip()[:2] in ('["', "['"):
        value = _list_of_texts(value)
    if isinstance(value, (list, tuple)):
        if not value:
            raise DataError(
                f"{field!r} is an empty list; leave this row out or name another answer field"
            )
        return ", ".join(answer_text(part, field) for part in value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 27.0 in a JSON file means the integer answer 27
    if (
        not isinstance(value, (str, int, float))
        or isinstance(value, bool)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise DataError(f"{field!r} must be text, a number or a list of these, got {value!r:.60}")
    # 2e-07 in a JSON file means 0.0000002.
    text = (f"{Decimal(repr(value)):f}" if isinstance(value, float) else str(value)).strip()
    if text.lower() in ("", *NO_ANSWER):
        raise DataError(
            (f"{field!r} is {text!r}, which is not an answer" if text else f"{field!r} is empty")
            + "; leave this row out or name another answer field"
        )
    box = last_box(text)
    text = plain(text if box is None else box)
    if not text:
        raise DataError(
            f"{field!r} is {value!r:.60}, which is not an answer; leave this row out or name "
            "another answer field"
        )
    return text


def _list_of_texts(text: str) -> Any:
    """Returns the list that a text such as '["36"]' writes as JSON or Python; else the text."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            found = read(text)
            if isinstance(found, list) and all(isinstance(part, str) for part in found):
                return found
    return text


def plain(text: str) -> str:
    r"""Removes formatting from an answer: dollars, \( \) or \[ \] around formulas, a dollar before
    an amount, underscores or ,\! in thousands, leading zeros, a full stop, and m_{\max}= or \approx
    before the answer. Adds the braces of \frac \pi4.
    """
    text = _without_dollars(text.translate({0xFF1B: ";", 0xFF0C: ","}).strip())
    text = re.sub(r"^\\([(\[])((?:(?!\\[()\[\]]).)*)\\[)\]]$", r"\2", text, flags=re.DOTALL).strip()
    if text.count("=") == 1:  # in "y_{\max} = 5, y_{\min} = 1" both are the answer
        text = re.sub(r"^[A-Za-z]_(?:\\(?:max|min)|\{\s*\\(?:max|min)\s*\})\s*=", "", text).strip()
    text = re.sub(r"^\\approx(?![A-Za-z])|(?<!\\)[\s,;]+$", "", text).strip()
    text = re.sub(r"(?<=[\d})])\.$", "", text)
    text = braced_fractions(arguments(separators(text)))
    if re.fullmatch(r"[-+]?\d+", number := thousands(layout(text))) and "," not in text:
        text = number
    if re.fullmatch(r"-?0+\d+", text):
        text = re.sub(r"^(-?)0+(?=\d)", r"\1", text)
    return re.sub(r"^([-+]?\d+)\.0+$", r"\1", text)


def _without_dollars(text: str) -> str:
    if "$" not in text:
        return text
    pieces = re.split(r"(?<!\\)\$\$?", text)
    # Formulas are the odd pieces. If one dollar is missing ("$221,$8$"), all pieces are formulas.
    outside = [pieces[0].removeprefix("-"), *pieces[2::2]]
    if len(pieces) % 2 and not all(_LIST.fullmatch(piece) for piece in outside):
        return text  # formulas in prose
    if len(pieces) == 2 and pieces[0].strip() not in ("", "-", "+") and pieces[1].strip():
        return text
    spaced = (f"{piece} " if piece.endswith(",") else piece for piece in pieces)
    return "".join(spaced).strip().rstrip(".").strip()


def without_unit(answer: str) -> str:
    """Removes ASDiv's unit: "9 (apples)" gives "9", "1,080 (square feet)" gives "1080".

    Use it only for ASDiv rows: elsewhere parentheses may hold a factor or a base.
    """
    found = re.fullmatch(r"([-+]?[\d,]*\.?\d+(?:/\d+)?) +\([^()\d]+\)", answer)
    return found[1].replace(",", "") if found else answer


def is_integer(answer: str) -> bool:
    """Returns whether an answer is an integer in plain form: 42, -7, 1,080 or 3.0."""
    return bool(_INTEGER.fullmatch(answer))


def restore_spacing(answer: str, solution: str) -> str:
    r"""Repairs an answer that lost its spaces or its end, from the solution's last box.

    Copies of MATH have "-80\leqg(x)\leq82" for "-80\leq g(x)\leq 82", or answers that end inside a
    brace; parsers cannot read these. Returns the box if the answer ends inside a brace, or differs
    from the box only in spacing, braces and backslashes; else returns the answer.
    """
    if not re.search(r"[\\{]", answer):
        return answer
    box = last_box(solution)
    if box and closing_brace(answer + "}", 0) != len(answer):
        return plain(box)

    def squeeze(text):
        return re.sub(
            r"\\(?:left|right|text|mbox|,|!|;|:)|[\s\\{}]", "", text.replace("dfrac", "frac")
        )

    return plain(box) if box and squeeze(box) == squeeze(answer) else answer
