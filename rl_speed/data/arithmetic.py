"""Questions with short answers for small pretrained models, as files.

    python -m rl_speed.data.arithmetic FOLDER              # "What is 47 + 6?", made by rule
    python -m rl_speed.data.arithmetic FOLDER mawps.jsonl  # word problems of a file

writes cold_start.jsonl (questions with solutions, for experiments/sft.py), train.jsonl (questions
for RL) and test.jsonl (held-out questions: one in eight, by a hash of the text). No question is in
two of the files, nor a copy of it with other case, white space or punctuation.

Word problems are rows with "question" and "answer" (MAWPS, SVAMP), whose answers are integers. A
cold start's solution is an equation of two or three numbers of the question, "76 + 9 = 85": the
first that gives the answer, so not always what was meant.
"""

import itertools
import json
import operator
import re
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

from rl_speed.data.chain import generator_of, held_out
from rl_speed.data.loaders import DataError, load_rows
from rl_speed.data.select import contamination_key

FILES = ("cold_start", "train", "test")
# Questions made by rule, for each file.
SIZES = (480, 4000, 256)
# Share of a file's training questions that are for the cold start.
COLD_START = 0.4
# Largest first and second factor of a product; operands of sums and differences are up to 99.
FACTORS = (99, 9)
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

Rows = list[dict[str, str]]


def question(generator: np.random.Generator) -> tuple[str, str]:
    """Draws a question and its answer: sums, differences that are not negative, and products are
    equally likely. A small model learns these; it fails at three operands and at negative answers.
    """
    sign = "+-*"[generator.integers(3)]
    if sign == "*":
        first, second = (int(generator.integers(2, most + 1)) for most in FACTORS)
    else:
        # As many operands of one digit as of two.
        first, second = (int(generator.integers(1, 10 ** generator.integers(1, 3))) for _ in "ab")
        if sign == "-":
            first, second = max(first, second), min(first, second)
    return f"What is {first} {sign} {second}?", str(_OPERATIONS[sign](first, second))


def by_rule(seed: int = 0) -> tuple[Rows, Rows, Rows]:
    """Returns the rows of each of `FILES`. The same questions are held out for every `seed`."""
    seen: set[str] = set()
    found: tuple[Rows, Rows, Rows] = ([], [], [])
    for kept, size, split in zip(found, SIZES, ("demo", "train", "eval")):
        generator = generator_of(split, seed, 0)
        while len(kept) < size:
            text, answer = question(generator)
            if text not in seen and held_out(text) == (split == "eval"):
                seen.add(text)
                solution = {"solution": answer} if split == "demo" else {}
                kept.append({"question": text, "answer": answer, **solution})
    return found


def of_file(path: str | Path) -> tuple[Rows, Rows, Rows]:
    """Returns the rows of each of `FILES`, of the word problems in `path` whose answer is an
    integer.

    Raises `loaders.DataError`, which names the file, and the line if one is at fault.
    """
    # One row of those that are copies of a question.
    found = {contamination_key(row.question): row for row in load_rows(path, keep="integer")[0]}
    rows = {row.question: str(int(Fraction(row.answer.replace(",", "")))) for row in found.values()}
    test = [row.question for key, row in found.items() if held_out(key)]
    texts = [row.question for key, row in found.items() if not held_out(key)]
    train = [texts[i] for i in generator_of("train", 0, 0).permutation(len(texts))]
    first = round(COLD_START * len(train))
    solved = {text: equation(text, int(rows[text])) for text in train[:first]}
    parts = (
        [{"question": t, "answer": rows[t], "solution": s} for t, s in solved.items() if s],
        [{"question": t, "answer": rows[t]} for t in train[first:]],
        [{"question": t, "answer": rows[t]} for t in test],
    )
    for name, part in zip(FILES, parts):
        if not part:
            raise DataError(
                f"{path}: its {len(rows)} questions with an integer as answer leave none for "
                f"{name}.jsonl; give a larger file"
            )
    return parts


def equation(text: str, answer: int) -> str:
    """Returns an equation of two or else three integers of `text`, in any order, whose value is
    `answer`; "" if there is none.
    """
    found = re.findall(r"(?<![\d.,])\d+(?:,\d{3})*(?![\d.,]*\d)", text)
    numbers = [int(number.replace(",", "")) for number in found]
    for count in (2, 3):
        for first, *others in itertools.permutations(numbers, count):
            for signs in itertools.product(_OPERATIONS, repeat=count - 1):
                value, written = Fraction(first), str(first)
                for sign, number in zip(signs, others):
                    if sign == "/" and not number:
                        break
                    bracket = sign in "*/" and {"+", "-"} & set(written)
                    written = (
                        f"({written}) {sign} {number}" if bracket else f"{written} {sign} {number}"
                    )
                    value = _OPERATIONS[sign](value, number)
                else:
                    if value == answer:
                        return f"{written} = {answer}"
    return ""


def main(folder: str, file: str = "") -> None:
    """Writes `FILES` into `folder`, which is made if it does not exist."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, rows in zip(FILES, of_file(file) if file else by_rule()):
        path = Path(folder) / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(f"{path}: {len(rows):,} questions")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    try:
        main(*sys.argv[1:])
    except (DataError, OSError) as error:
        sys.exit(f"error: {error}")
