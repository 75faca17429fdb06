r"""Countdown: reach a target with + - * / from given numbers,
each used exactly once (as in TinyZero).

A verifier for `config.reward.verifier="rl_speed.rewards.countdown:score"`, and an example of a
user's reward function: standard library only, and nothing is executed.
"""

import ast
import operator
import re
from collections import Counter
from fractions import Fraction

from rl_speed.answers import closing_brace

MAX_CHARACTERS = 400  # of an expression; a longer one cannot answer a handful of numbers

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS = {
    **dict.fromkeys((r"\times", r"\cdot", "×", "·"), "*"),
    **dict.fromkeys((r"\div", "÷"), "/"),
    "−": "-",
    **dict.fromkeys((r"\left", r"\right", r"\,", "$"), ""),
    "[": "(",
    "]": ")",
}
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def score(response: str, answer: str, meta: dict) -> float:
    r"""1 if the answer is an expression of value `target` that uses every one of `meta["nums"]`
    exactly once and nothing else; else 0.

    The answer is the last <answer>...</answer>, or else the last \boxed{...}. "= target" may follow
    it. The target is `meta["target"]`, or the gold answer. Values are exact fractions.

    Raises KeyError if `meta` has no "nums", ValueError if the target is no integer.
    """
    numbers = [int(n) for n in meta["nums"]]
    target = int(meta.get("target", answer))
    expression = extract(response)
    if expression is None:
        return 0.0
    left, equals, right = expression.partition("=")
    try:
        if equals and evaluate(right)[0] != target:
            return 0.0
        value, used = evaluate(left)
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and Counter(used) == Counter(numbers))


def extract(response: str) -> str | None:
    r"""The content of the last answer tag, or if there is none of the last \boxed{}; else None."""
    if tagged := _TAGGED.findall(response):
        return tagged[-1].strip()
    _, boxed, rest = response.rpartition(r"\boxed{")
    end = closing_brace(rest, 0) if boxed else None
    return None if end is None else rest[:end].strip()


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """(value, its integers with repetition) of an expression of integers, + - * / and brackets.

    Raises ValueError for anything else, ZeroDivisionError if it divides by zero.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression of {len(expression)} characters")
    while (plain := _FRACTION.sub(r"((\1)/(\2))", expression)) != expression:
        expression = plain
    for sign, meaning in _SIGNS.items():
        expression = expression.replace(sign, meaning)
    if not re.fullmatch(r"[0-9+\-*/()\s]+", expression):
        raise ValueError(f"{expression!r} has other signs than digits, + - * / and brackets")
    try:
        tree = ast.parse(" ".join(expression.split()), mode="eval")
    except (SyntaxError, MemoryError, RecursionError) as error:
        # MemoryError and RecursionError: brackets nested too deep.
        raise ValueError(f"{expression!r}: {error}") from None
    used: list[int] = []
    return _value(tree.body, used), used


def _value(node, used):
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{type(node).__name__} is not allowed")
