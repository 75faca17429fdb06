"""Questions with short answers: made by rule, and of a file of word problems."""

import ast
import json
import operator

import pytest

from rl_speed.data import arithmetic
from rl_speed.data.chain import held_out
from rl_speed.data.loaders import DataError
from rl_speed.data.select import contamination_key

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(text):
    """The value of sums, differences, products and quotients, by Python's own grammar."""

    def of(node):
        if isinstance(node, ast.Constant):
            return node.value
        left, right = of(node.left), of(node.right)
        if isinstance(node.op, ast.Div):
            return left / right
        return OPERATORS[type(node.op)](left, right)

    return of(ast.parse(text, mode="eval").body)


def test_questions_by_rule_have_their_answers_and_no_question_is_in_two_files():
    files = arithmetic.by_rule()
    assert [len(rows) for rows in files] == list(arithmetic.SIZES)
    texts = [[row["question"] for row in rows] for rows in files]
    assert len(set(sum(texts, []))) == sum(arithmetic.SIZES)
    assert [set(map(held_out, of)) for of in texts] == [{False}, {False}, {True}]
    for row in sum(files, []):
        question = row["question"].removeprefix("What is ").removesuffix("?")
        assert str(value(question)) == row["answer"] == row.get("solution", row["answer"])
    assert all("solution" in row for row in files[0])
    assert arithmetic.by_rule(seed=1)[1] != files[1]


@pytest.mark.parametrize(
    "text,answer,equation",
    [
        ("76 erasers, and 9 more", 85, "76 + 9 = 85"),
        ("He gave 16. Now he has 54.", 38, "54 - 16 = 38"),
        ("8 boxes of 4 scarves and 6 mittens", 80, "(4 + 6) * 8 = 80"),
        ("48,097 bushels and 684 more", 48781, "48097 + 684 = 48781"),
        ("36 flowers for 4 vases of 0", 9, "36 / 4 = 9"),
        ("3.5 miles and 2 more", 5, ""),
        ("1,234.5 liters, 3 more, and 1", 4, "3 + 1 = 4"),
        ("7 apples", 7, ""),
    ],
)
def test_an_equation_of_numbers_of_the_text(text, answer, equation):
    assert arithmetic.equation(text, answer) == equation
    if equation:
        assert value(equation.split(" = ")[0]) == answer


def test_word_problems_are_divided_and_written(tmp_path, capsys):
    path = tmp_path / "words.jsonl"
    rows = [
        {"question": f"{i} cats and {i + 1} dogs?", "answer": f"{2 * i + 1}"} for i in range(90)
    ]
    copies = [row | {"question": row["question"].upper().replace("?", " ?")} for row in rows[20:80]]
    rows[7]["answer"], rows[8]["answer"] = "1,015", "17.0"
    rows.append({"question": "How long?", "answer": "2.5"})
    path.write_text("".join(json.dumps(row) + "\n" for row in copies + rows))
    arithmetic.main(str(tmp_path / "out"), str(path))
    found = [
        [json.loads(line) for line in (tmp_path / "out" / f"{name}.jsonl").open()]
        for name in arithmetic.FILES
    ]
    assert sorted(row["question"] for row in sum(found, [])) == sorted(
        row["question"] for row in rows[:-1]
    )
    keys = [{contamination_key(row["question"]) for row in part} for part in found]
    assert [set(map(held_out, of)) for of in keys] == [{False}, {False}, {True}]
    assert found[0][0]["solution"].endswith(f"= {found[0][0]['answer']}")
    assert capsys.readouterr().out.count("questions") == 3
    assert {"1015", "17"} <= {row["answer"] for row in sum(found, [])}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    with pytest.raises(DataError, match="words.jsonl: its 2 questions .* leave none for "):
        arithmetic.main(str(tmp_path / "few"), str(path))
    path.write_text("no row\n")
    with pytest.raises(DataError, match="words.jsonl"):
        arithmetic.of_file(path)
