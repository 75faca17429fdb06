"""Read conversation turns of a data row in any form: lists of objects, their JSON text, arrays;
content as text or as parts.
"""

import ast
import json
import re
from typing import Any

from rl_speed.data.files import DataError

_TURNS_AS_TEXT = re.compile(r"\s*\[\s*\{.*?[\"'](role|from)[\"']\s*:", re.DOTALL)
# Role names in ShareGPT's form, {"from": ..., "value": ...}.
_ROLES = {"human": "user", "gpt": "assistant"}


def as_python(value: Any) -> Any:
    """A value of Arrow or NumPy as a Python value; others unchanged."""
    if hasattr(value, "as_py"):
        value = value.as_py()
    return value.tolist() if hasattr(value, "tolist") else value


def parsed(value: Any, name: str) -> Any:
    """The turns in JSON text or in Python's form of it, which pandas writes into CSV files. One
    turn becomes a list; any other value is unchanged. Raises DataError for text that begins like
    turns but cannot be read.
    """
    value = as_python(value)
    if isinstance(value, dict) and "role" in value:
        return [value]
    if not isinstance(value, str) or not _TURNS_AS_TEXT.match(value):
        return value
    return read_literal(value, name)


def read_literal(text: str, name: str) -> Any:
    """The value of JSON text, or of Python's form of it; raises DataError if it is neither."""
    try:
        return json.loads(text)
    except ValueError as error:
        try:
            return ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise DataError(f"{name!r} looks like JSON, and is not ({error})") from None


def read_turns(turns: Any, name: str) -> list[dict[str, Any]]:
    """Turns as {"role": ..., "content": text}, with their other fields for the chat template.

    Raises:
      DataError: a turn without role or content, content that is not text, tool calls, or a loss
        weight.
    """
    return [_turn(as_python(turn), f"{name!r}: turn {i}") for i, turn in enumerate(turns, start=1)]


def _turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise DataError(f"{where} is no object with role and content, but {turn!r:.40}")
    turn = {key: value for key, value in turn.items() if value is not None}
    if "role" not in turn and "from" in turn:
        role = turn.pop("from")
        turn = {"role": _ROLES.get(role, role), "content": turn.pop("value", None), **turn}
    if not isinstance(turn.get("role"), str):
        raise DataError(f"{where} has no role; it has {sorted(turn)}")
    where = f"{where} ({turn['role']})"
    for key in ("tool_calls", "function_call", "weight"):
        if key in turn and (key == "weight" or len(as_python(turn[key]))):
            raise DataError(f"{where} has {key!r}, which is not read")
    return {**turn, "content": _content(turn.get("content"), where)}


def _content(content: Any, where: str) -> str:
    """Text, or the joined texts of its parts."""
    content = as_python(content)
    parts = [content] if isinstance(content, str | dict) else content
    if not isinstance(parts, list | tuple):
        raise DataError(f"{where} has no content, but {content!r:.40}")
    texts = []
    for part in map(as_python, parts):
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        text = part.get("text") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(text, str):
            raise DataError(
                f"{where} has a part of type {kind!r} ({part!r:.40}); text is read alone"
            )
        texts.append(text)
    return "".join(texts)
