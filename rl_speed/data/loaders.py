"""Questions with answers from files: JSON lines, gzipped JSON lines, or one JSON array.

Understood as people publish them: the question under "question" or "problem"; the answer under "answer" or
"final_answer", as text, a number, or a list of one; in GSM8K's form, where "answer" is a worked solution that ends in
"#### 42", that last part. A worked solution under "solution" is kept for supervised training.
"""

import dataclasses
import gzip
import json
import pathlib
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from rl_speed.data.prompts import Prompt

QUESTION_FIELDS = ("question", "problem")
ANSWER_FIELDS = ("answer", "final_answer")
_META_FIELDS = ("level", "type", "subject", "difficulty", "source")


class DataError(ValueError):
    """A data file or a row of it that cannot be used; the message names file and line."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
      id: the row's "id", "index" or "unique_id", else FILE:LINE.
      question, answer: text, stripped.
      solution: worked solution, empty where the file has none.
      meta: level, type, subject, difficulty and source where given.
    """

    id: str
    question: str
    answer: str
    solution: str = ""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What happened while loading: rows kept, bad rows skipped (with the reasons of the first few), prompts too long."""

    kept: int
    bad: int = 0
    reasons: tuple[str, ...] = ()
    too_long: int = 0


def load_rows(path: str | pathlib.Path, on_bad_row: str = "error") -> tuple[list[Row], LoadReport]:
    """Reads PATH.jsonl, PATH.jsonl.gz or PATH.json (an array of objects; "line" is then the item's number).

    Args:
      on_bad_row: "error" raises at the first bad row, "skip" counts it and goes on.

    Raises:
      DataError: no such file, not readable as what its name says, a bad row, or no row that can be used.
      ValueError: `on_bad_row` is neither.
    """
    if on_bad_row not in ("error", "skip"):
        raise ValueError(f'on_bad_row must be "error" or "skip", got {on_bad_row!r}')
    path = pathlib.Path(path)
    rows, bad, reasons = [], 0, []
    for line, item in read_items(path):
        try:
            rows.append(_row(item, f"{path.name}:{line}"))
        except DataError as error:
            message = f"{path}:{line}: {error}"
            if on_bad_row == "error":
                raise DataError(f'{message} (on_bad_row="skip" would count it and go on)') from None
            bad += 1
            if len(reasons) < 5:
                reasons.append(message)
    if not rows:
        raise DataError(f"{path}: no usable row" + (f"; first of {bad} bad ones: {reasons[0]}" if bad else ", it is empty"))
    return rows, LoadReport(kept=len(rows), bad=bad, reasons=tuple(reasons))


def rows_to_prompts(rows: Sequence[Row], encode: Callable[[str], Sequence[int]],
                    max_prompt_tokens: int) -> tuple[list[Prompt], int]:
    """Encodes questions, and drops those whose prompt is longer than `max_prompt_tokens`; returns how many.

    Args:
      encode: question -> token ids, template included.

    Raises:
      DataError: nothing is left.
    """
    prompts = []
    for row in rows:
        tokens = np.asarray(encode(row.question), np.int32)
        if len(tokens) <= max_prompt_tokens:
            prompts.append(Prompt(id=row.id, tokens=tokens, answer=row.answer, answer_tokens=np.zeros((0,), np.int32),
                                  text=row.question, meta=dict(row.meta)))
    if not prompts:
        raise DataError(f"all {len(rows)} prompts are longer than max_prompt_tokens = {max_prompt_tokens}")
    return prompts, len(rows) - len(prompts)


def load_prompts(path: str | pathlib.Path, encode: Callable[[str], Sequence[int]], max_prompt_tokens: int,
                 on_bad_row: str = "error") -> tuple[list[Prompt], LoadReport]:
    """`load_rows`, then `rows_to_prompts`, with one report of both."""
    rows, report = load_rows(path, on_bad_row)
    prompts, too_long = rows_to_prompts(rows, encode, max_prompt_tokens)
    return prompts, dataclasses.replace(report, kept=len(prompts), too_long=too_long)


def read_items(path: pathlib.Path) -> Iterator[tuple[int, Any]]:
    """Line number and parsed value (or the DataError it gave) of each row of a .jsonl[.gz] or .json[.gz] file.

    Raises: DataError, no such file, or not readable as what its name says.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    name = path.name.removesuffix(".gz")
    if not name.endswith((".json", ".jsonl")):
        raise DataError(f"{path}: expected a name ending in .jsonl, .jsonl.gz, .json or .json.gz")
    try:
        data = gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a whole gzip file ({error})") from None
    if name.endswith(".json"):
        whole = _parse(data)
        if isinstance(whole, DataError):
            raise DataError(f"{path}: {whole}")
        if not isinstance(whole, list):
            raise DataError(f"{path}: expected a JSON array of rows, got {type(whole).__name__}")
        yield from enumerate(whole, start=1)
        return
    for line, raw in enumerate(data.split(b"\n"), start=1):
        if raw.strip():
            yield line, _parse(raw)


def _parse(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return DataError(f"not UTF-8 ({error.reason} at byte {error.start})")
    except json.JSONDecodeError as error:
        return DataError(f"not JSON ({error.msg} at column {error.colno})")


def _row(item: Any, where: str) -> Row:
    if isinstance(item, DataError):
        raise item
    if not isinstance(item, dict):
        raise DataError(f"expected an object, got {type(item).__name__}")
    question = next((item[f] for f in QUESTION_FIELDS if f in item), None)
    if not isinstance(question, str) or not question.strip():
        raise DataError(f'no text under {" or ".join(map(repr, QUESTION_FIELDS))}; it has {sorted(item)}')
    field = next((f for f in ANSWER_FIELDS if f in item), None)
    if field is None:
        raise DataError(f'no {" or ".join(map(repr, ANSWER_FIELDS))}; it has {sorted(item)}')
    given = _answer_text(item[field], field)
    solution = item.get("solution")
    solution = solution.strip() if isinstance(solution, str) else ""
    if "####" in given:  # GSM8K
        solution = solution or given
        given = _plain_number(given.rsplit("####", 1)[1].strip())
        if not given:
            raise DataError("nothing after '####'")
    return Row(id=row_id(item, where), question=question.strip(), answer=given, solution=solution,
               meta={f: item[f] for f in _META_FIELDS if item.get(f) is not None})


def row_id(item: dict[str, Any], where: str) -> str:
    """A row's "id", "index" or "unique_id", else `where` (FILE:LINE)."""
    return str(next((item[f] for f in ("id", "index", "unique_id") if item.get(f) is not None), where))


def _answer_text(value: Any, field: str) -> str:
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # 27.0 in a JSON file means the integer answer 27
    if isinstance(value, (str, int, float)) and not isinstance(value, bool) and str(value).strip():
        return str(value).strip()
    raise DataError(f"{field!r} must be text, a number or a list of one, got {value!r:.60}")


def _plain_number(text: str) -> str:
    """Drops GSM8K's thousands separators, 1,080 -> 1080. Elsewhere "1,080" may be a pair, and is left alone."""
    return text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text
