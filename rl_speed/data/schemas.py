r"""From a published row to a question and its gold answer: which field is what, in the data sets that people train on.

Known without being told (field names in any case; the first that a row has):

| data set | question | answer | taken along |
|---|---|---|---|
| GSM8K | question | answer, what follows "####" | the whole answer as solution |
| MATH, MATH500 | problem | answer, else the solution's last \boxed{} | level, type or subject |
| NuminaMath-CoT, Minerva | problem | the solution's last \boxed{} | source, type |
| NuminaMath-1.5, OpenR1-Math | problem | answer ("proof" and "notfound" are none) | problem_type, question_type, source |
| DAPO-17k and others of verl's form | extra_info.question, else the user turn of prompt | reward_model.ground_truth | data_source |
| DAPO-17k, processed | prompt | reward_model.ground_truth, solution | data_source |
| Reinforce-Ada | problem | gt | |
| DeepScaleR, open-rs | problem | answer | level |
| AIME, AMC | problem, Problem, question | answer, Answer | year |
| OlympiadBench | question, with context before it | final_answer, its parts joined | subfield, unit |
| countdown, of TinyZero too | composed of nums and target | target | nums |

A prompt in verl's form is taken out of the instruction around it (`WRAPPERS`): which instruction the policy sees is
`config.data.prompt` and `config.data.instruction`. Its system turn is left out for the same reason. Countdown's gold is its target
alone: a verifier that compares values takes the bare target for an answer, too; meta["nums"] is for one that reads equations.
"""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

from rl_speed.data import gold
from rl_speed.data.files import DataError

QUESTIONS = ("question", "problem", "prompt", "extra_info.question", "query", "input")
ANSWERS = ("answer", "final_answer", "reward_model.ground_truth", "expected_answer", "ground_truth", "gt", "gold", "target")
SOLUTIONS = ("solution", "extra_info.answer", "original_solution", "generated_solution")
IDS = ("id", "index", "unique_id", "uuid", "extra_info.index", "idx")
_META = ("level", "type", "subject", "subfield", "difficulty", "source", "data_source", "problem_type", "question_type", "year",
         "unit", "nums")

# What publishers put around a question: (before, after).
WRAPPERS = (
    ("Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer (without "
     "quotes) where $Answer is the answer to the problem.\n\n", '\n\nRemember to put your answer on its own line after "Answer:".'),
    ("", " Let's think step by step and output the final answer within \\boxed{}."),
    ("", ' Let\'s think step by step and output the final answer after "####".'),
    ("", "\nPlease reason step by step, and put your final answer within \\boxed{}."),
)
# TinyZero's wording, without its format instruction.
COUNTDOWN = ("Using the numbers {nums}, create an equation that equals {target}. You can use basic arithmetic operations "
             "(+, -, *, /) and each number can only be used once.")


@dataclasses.dataclass(frozen=True)
class Fields:
    """Which field of a row is what; dotted for nested ones (`reward_model.ground_truth`), "" for found by itself.

    Where `required` is false, a row that lacks a named field is looked through like any other: evaluation files have other
    publishers.
    """

    question: str = ""
    answer: str = ""
    solution: str = ""
    required: bool = True


@dataclasses.dataclass(frozen=True)
class Row:
    """One question.

    Attributes:
      id: the row's id, index, unique_id or uuid, else FILE:LINE.
      question, answer: text, stripped.
      solution: worked solution, empty where the file has none.
      meta: level, type, subject, difficulty, source and the like where given; countdown's nums.
      where: FILE:LINE.
    """

    id: str
    question: str
    answer: str
    solution: str = ""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""


def to_row(item: Any, where: str, fields: Fields = Fields(), answers: bool = True) -> Row:
    """The question of a row as published. Without `answers` a solution will do where there is no answer to be found.

    Raises:
      DataError: no object, no question, no answer, or of the wrong type; or the error that `item` is.
    """
    if isinstance(item, DataError):
        raise item
    if not isinstance(item, dict):
        raise DataError(f"expected an object, got {type(item).__name__}")
    item = _flat(item)
    names = [name if fields.required or not name or _walk(item, name) is not None else ""
             for name in (fields.question, fields.answer, fields.solution)]
    question = _question(item, names[0])
    solution = _solution(item, names[2])
    try:
        answer, solution = _answer(item, names[1], solution)
    except DataError:
        if answers or not solution:
            raise
        answer = ""
    meta = {name: _plain(item[name]) for name in _META if item.get(name) not in (None, "")}
    row = Row(row_id(item, where), question, answer, solution, meta, where)
    for name, text in (("id", row.id), ("answer", answer), ("solution", solution)):
        _require_unicode(name, text)
    return row


def _plain(value: Any) -> Any:
    """What JSON can hold; other values of Parquet files (dates, bytes, decimals) as text."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return str(value)


def _require_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may hold half a character, which no tokenizer takes
        raise DataError(f"{name!r} is not Unicode text ({error.reason} at character {error.start})") from None


def row_id(item: dict[str, Any], where: str) -> str:
    """A row's id, index, unique_id or uuid, else `where` (FILE:LINE)."""
    flat = _flat(item)
    return str(next((flat[name] for name in IDS if flat.get(name) is not None), where))


def proof(item: dict[str, Any]) -> bool:
    """Whether a row asks for a proof, as NuminaMath-1.5 and its descendants mark it."""
    item = _flat(item)
    return any(str(item.get(name)).strip().lower() == "proof" for name in ("answer", "question_type"))


def invalid(item: dict[str, Any]) -> bool:
    """Whether the publisher marks problem or solution as not valid (NuminaMath-1.5)."""
    item = _flat(item)
    return any(name in item and str(item[name]).strip().lower() not in ("yes", "true")
               for name in ("problem_is_valid", "solution_is_valid"))


def choice(item: dict[str, Any]) -> bool:
    """Whether a row is a multiple-choice question: so marked, or its answer is a letter from A to E."""
    item = _flat(item)
    return str(item.get("question_type")).lower() in ("mcq", "multiple-choice") or bool(
        re.fullmatch(r"\(?[A-E]\)?", str(item.get("answer")).strip()))


# For config.data.keep: rows that do not pass are left out and counted, whether they are usable or not. First what is asked of the
# row as published, then what is asked of its answer.
KEEP_ITEM: dict[str, Callable[[dict[str, Any]], bool]] = {
    "no_proof": lambda item: not proof(item), "valid": lambda item: not invalid(item), "no_choice": lambda item: not choice(item)}
KEEP_ANSWER: dict[str, Callable[[str], bool]] = {"integer": gold.is_integer}


def keep_names(keep: str) -> tuple[str, ...]:
    """The filters that a comma-separated text names.

    Raises:
      ValueError: one that there is not.
    """
    names = tuple(filter(None, (name.strip() for name in keep.split(","))))
    known = (*KEEP_ITEM, *KEEP_ANSWER)
    for name in names:
        if name not in known:
            raise ValueError(f"config.data.keep must name some of {', '.join(known)}, with commas between them; got {name!r}")
    return names


def _flat(item: dict[str, Any]) -> dict[str, Any]:
    """Names in lower case; what is inside reward_model, extra_info and other objects also under its dotted name."""
    flat: dict[str, Any] = {}
    for name, value in item.items():
        flat.setdefault(str(name).lower(), value)
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}".lower(): v for inner, v in value.items()}
    puzzle = flat.get("reward_model.ground_truth")
    if isinstance(puzzle, dict) and "target" in puzzle and "numbers" in puzzle:  # TinyZero's countdown
        flat |= {"nums": puzzle["numbers"], "target": puzzle["target"], "reward_model.ground_truth": None}
    return flat


def _walk(item: dict[str, Any], name: str) -> Any:
    """The value under a name, dotted for nested ones; None where there is none."""
    if name.lower() in item:
        return item[name.lower()]
    value: Any = item
    for part in name.split("."):
        value = {str(k).lower(): v for k, v in value.items()}.get(part.lower()) if isinstance(value, dict) else None
    return value


def _given(item: dict[str, Any], name: str, what: str) -> Any:
    if (value := _walk(item, name)) is None:
        raise DataError(f"no {name!r}, which config.data.{what}_field names; it has {_names(item)}")
    return value


def _names(item: dict[str, Any]) -> list[str]:
    return sorted(item)


def _question(item: dict[str, Any], given: str) -> str:
    if given:
        return _question_text(_given(item, given, "question"), given, item)
    if isinstance(item.get("nums"), (list, tuple)) and "target" in item and not item.get("question"):
        nums = ", ".join(str(n) for n in item["nums"])
        return COUNTDOWN.format(nums=f"[{nums}]", target=item["target"])
    name = next((name for name in QUESTIONS if item.get(name) is not None), None)
    if name is None:
        raise DataError(f"no text under {' or '.join(map(repr, QUESTIONS[:3]))}; it has {_names(item)}")
    return _question_text(item[name], name, item)


def _question_text(value: Any, name: str, item: dict[str, Any]) -> str:
    if isinstance(value, (list, tuple)):
        value = _user_turn(value, name)
        raw = item.get("extra_info.question")
        # verl's examples keep the question beside the prompt that was made of it.
        value = raw if isinstance(raw, str) and raw.strip() and raw.strip() in value else _unwrapped(value)
    elif isinstance(value, str) and name == "prompt":
        value = _unwrapped(value)
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"no text under {name!r}, but {value!r:.60}; it has {_names(item)}")
    context = item.get("context")  # OlympiadBench
    text = f"{context.strip()}\n{value.strip()}" if isinstance(context, str) and context.strip() else value.strip()
    _require_unicode(name, text)
    return text


def _user_turn(messages: Any, name: str) -> str:
    turns = [m for m in messages if isinstance(m, dict) and m.get("role") != "system"]
    if len(turns) != 1 or turns[0].get("role") != "user" or not isinstance(turns[0].get("content"), str):
        roles = [m.get("role") if isinstance(m, dict) else type(m).__name__ for m in messages]
        raise DataError(f"{name!r} must hold one user turn, and perhaps a system turn; it holds {roles}")
    return turns[0]["content"]


def _unwrapped(text: str) -> str:
    text = text.strip()
    for before, after in WRAPPERS:
        if text.startswith(before) and text.endswith(after):
            return text[len(before):len(text) - len(after)]
    return text


def _solution(item: dict[str, Any], given: str) -> str:
    value = _given(item, given, "solution") if given else next((item[n] for n in SOLUTIONS if item.get(n) is not None), "")
    if isinstance(value, (list, tuple)):  # OlympiadBench: several solutions
        value = value[0] if value else ""
    return value.strip() if isinstance(value, str) else ""


def _answer(item: dict[str, Any], given: str, solution: str) -> tuple[str, str]:
    """(gold answer, solution)."""
    if given:
        value, name = _given(item, given, "answer"), given
    else:
        name = next((name for name in ANSWERS if item.get(name) is not None), None)
        if name is None:
            return _answer_in(solution, item), solution
        value = item[name]
        if value == "" and gold.last_box(solution):  # copies of MATH from which an answer in words was cut
            return _answer_in(solution, item), solution
    if isinstance(value, str) and "####" in value:  # GSM8K
        # Its thousands separators go, 1,080 -> 1080. Elsewhere "1,080" may be a pair, and is left alone.
        text = value.rsplit("####", 1)[1].strip()
        if not text:
            raise DataError("nothing after '####'")
        if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text):
            text = text.replace(",", "")
        return gold.answer_text(text, name), solution or value.strip()
    return gold.unsqueezed(gold.answer_text(value, name), solution), solution


def _answer_in(solution: str, item: dict[str, Any]) -> str:
    """MATH, NuminaMath-CoT, Minerva: in the solution's last box. A "solution" of one word or formula is the answer itself."""
    box = gold.last_box(solution)
    if box:
        return gold.answer_text(box, "solution")
    if solution and len(solution) <= 60 and (re.fullmatch(r"\S+", solution) or re.fullmatch(r"\$[^$]+\$", solution)):
        return gold.answer_text(solution, "solution")
    raise DataError(f"no {' or '.join(map(repr, ANSWERS[:2]))}, and no box in a solution; it has {_names(item)}")
