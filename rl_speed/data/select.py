"""Which rows may train: duplicates, a held-out split, and questions that are in an evaluation file.

Order is never changed.
"""

import hashlib
from collections.abc import Iterable, Sequence

from rl_speed.data.schemas import Row

_OTHER = bytes(sorted(set(range(128)) - set(b"abcdefghijklmnopqrstuvwxyz0123456789")))


def duplicate_key(question: str) -> str:
    """Equal for questions that differ in white space and case only: 2+3 is not 2-3."""
    return " ".join(question.split()).lower()


def contamination_key(question: str) -> str:
    """Equal for questions that differ in nothing but case and in what is not a-z and 0-9:
    generous, to find a copy in other markup. Empty where nothing is left; an empty key is no match.
    """
    return question.lower().encode("ascii", "ignore").translate(None, _OTHER).decode()


def deduplicate(rows: Sequence[Row]) -> tuple[list[Row], list[tuple[Row, Row]]]:
    """(the first row of each question, the others, each with the one that was kept)."""
    first: dict[str, Row] = {}
    kept, dropped = [], []
    for row in rows:
        key = duplicate_key(row.question)
        if key in first:
            dropped.append((row, first[key]))
        else:
            first[key] = row
            kept.append(row)
    return kept, dropped


def hold_out(rows: Sequence[Row], count: int) -> tuple[list[Row], list[Row]]:
    """(rows to train on, held-out rows): the `count` questions whose SHA-256 is lowest
    are held out.

    Which these are depends on the questions alone, not on their order, and hardly on what else is
    in the file: a question more pushes out at most one. All rows of a held-out question leave the
    training set; the held-out set has the first of them, lowest hash first.

    Raises:
      ValueError: there are not so many questions, and one to train on besides.
    """
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(duplicate_key(row.question), row)
    if not 0 < count < len(first):
        raise ValueError(
            f"config.data.hold_out ({count}) must leave something to train on: the training file "
            f"has {len(first)} different questions"
        )
    ranked = sorted(first, key=lambda key: hashlib.sha256(key.encode()).digest())
    held = set(ranked[:count])
    return [row for row in rows if duplicate_key(row.question) not in held], [
        first[key] for key in ranked[:count]
    ]


def contaminated(rows: Iterable[Row], questions: Iterable[str]) -> list[Row]:
    """The rows whose question is among `questions`, by `contamination_key`."""
    known = {contamination_key(question) for question in questions} - {""}
    return [row for row in rows if contamination_key(row.question) in known]
