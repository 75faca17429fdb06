r"""Gold answers: from the published form to the text that verifiers compare with.

Nothing here judges mathematics.
"""

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
# Text allowed between formulas in an answer that is a list of formulas.
_LIST = re.compile(r"(?:[\s,;.]|and|or)*")
# Answers that mean "there is none" in NuminaMath and its descendants.
NO_ANSWER = ("proof", "notfound", "not found")


def answer_text(value: Any, field: str) -> str:
    r"""A row's answer as text.

    A list is joined by commas (the parts of OlympiadBench's final_answer). Of an answer with a box,
    the box's content counts. It is made `plain`: "$69$,$84$" is 69,84, AIME's "073" is 73.

    Raises:
      DataError: not text, a number, or a list of these, or empty.
    """
    if isinstance(value, (list, tuple)):
        if not value:
            raise DataError(f"{field!r} is an empty list")
        return ",".join(answer_text(part, field) for part in value)
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
            f"{field!r} holds no answer but {text!r}" if text else f"{field!r} is empty"
        )
    box = last_box(text)
    text = plain(text if box is None else box)
    if not text:
        raise DataError(f"{field!r} holds no answer but {value!r:.60}")
    return text


def plain(text: str) -> str:
    r"""The answer without parts that only format it: dollars, \( \) or \[ \] around formulas, a
    dollar before an amount, underscores or ,\! in thousands, leading zeros, a full stop, and
    m_{\max}= or \approx before the answer. \frac \pi4 gets its braces.
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
    return "".join(pieces).strip().rstrip(".").strip()


def without_unit(answer: str) -> str:
    """ASDiv's "9 (apples)" and "1,080 (square feet)" as the number alone; other text unchanged.
    Only for rows of that form: elsewhere parentheses may hold a factor or a base.
    """
    found = re.fullmatch(r"([-+]?[\d,]*\.?\d+(?:/\d+)?) +\([^()\d]+\)", answer)
    return found[1].replace(",", "") if found else answer


def is_integer(answer: str) -> bool:
    """Whether an answer is a whole number, written plainly: 42, -7, 1,080 or 3.0."""
    return bool(_INTEGER.fullmatch(answer))


def restore_spacing(answer: str, solution: str) -> str:
    r"""The solution's last box, if the answer was cut inside a brace, or differs from the box only
    in spacing, braces and backslashes; else the answer.

    Copies of MATH have answers without spaces: "-80\leqg(x)\leq82" for "-80\leq g(x)\leq 82",
    "1\-2" for "1 \\ -2". Some were cut inside a brace. No parser can read these, and the box is the
    benchmark's own definition of the answer.
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
