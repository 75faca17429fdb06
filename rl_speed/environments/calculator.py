"""A calculator: the policy writes an expression, and the environment its value.

The mark behind an expression must end a turn: `environment.stop="="`.
"""

import ast
import operator
import re
from fractions import Fraction

from rl_speed.environments import Reply, Trajectory

_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# Operators of the embedded task "scratchpad" (rl_speed/data/chain.py), modulo 10.
_TABLES = {
    "+": lambda total, number: total + number,
    "-": lambda total, number: total - number,
    "~": lambda total, number: number - total,
    "^": lambda total, number: 3 * total + number,
}
_LONGEST = 200  # characters of an expression


def marks(trajectory: Trajectory) -> Reply | None:
    """Appends the value of an expression between "<<" and "=", as in GSM8K's solutions:
    "<<3*4=" is followed by "12>>". Other uses of "=" are left alone.
    """
    turn = trajectory.turns[-1]
    if trajectory.closed or not turn.endswith("="):
        return None
    _, opened, expression = turn[:-1].rpartition("<<")
    if not opened or ">>" in expression:
        return Reply()
    value = evaluate(expression)
    return Reply("?>>" if value is None else f"{value}>>")


def table(trajectory: Trajectory) -> Reply | None:
    """Writes the result of a step of the embedded task "scratchpad": "a3+4=" is followed by "7"."""
    turn = trajectory.turns[-1]
    if trajectory.closed or not turn.endswith("="):
        return None
    step = re.search(r"(\d)([-+~^])(\d)=$", turn)
    if step is None:
        return Reply()
    total, sign, number = step.groups()
    return Reply(str(_TABLES[sign](int(total), int(number)) % 10))


def evaluate(expression: str) -> str | None:
    """Returns the value of an expression of numbers, + - * / and parentheses: exactly if it is an
    integer, else to 6 digits; None if it has no value.
    """
    if len(expression) > _LONGEST:
        return None
    try:
        value = _value(ast.parse(expression.strip().replace(",", ""), mode="eval").body)
        return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise ValueError("not arithmetic")
