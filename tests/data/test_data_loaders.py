"""Loaders: schemas as published, and errors that name file and line."""

import gzip
import json

import pytest

from rl_speed.data.loaders import DataError, load_prompts, load_rows, rows_to_prompts

GSM8K = {"question": "How many?", "answer": "First 3, then 4.\n#### 1,080"}


def write(path, rows):
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_schemas(tmp_path, name):
    rows, report = load_rows(
        write(
            tmp_path / name,
            [
                GSM8K,
                {"id": 7, "question": " q ", "answer": "2/3", "level": 5},
                "",
                {"problem": "p", "answer": 27.0, "solution": "because"},
                {"unique_id": "u", "problem": "p", "final_answer": ["x=1,080"]},
            ],
        )
    )
    assert [(r.id, r.question, r.answer, r.solution) for r in rows] == [
        (f"{name}:1", "How many?", "1080", GSM8K["answer"]),
        ("7", "q", "2/3", ""),
        (f"{name}:4", "p", "27", "because"),
        ("u", "p", "x=1,080", ""),
    ]
    assert rows[1].meta == {"level": 5} and report.kept == 4 and report.bad == 0


def test_json_array(tmp_path):
    path = tmp_path / "d.json"
    path.write_text(json.dumps([{"problem": "a", "answer": "1"}, {"problem": "b"}]))
    with pytest.raises(DataError, match=r"d\.json:2: no 'answer'"):
        load_rows(path)
    path.write_text('{"problem": "a"}')
    with pytest.raises(DataError, match="expected a JSON array"):
        load_rows(path)


@pytest.mark.parametrize(
    "bad, reason",
    [
        ("{nope", "not JSON"),
        ("[1]", "expected an object, got list"),
        ({"answer": "1"}, "no text under 'question'"),
        ({"question": "", "answer": "1"}, "must be text"),
        ({"question": "q"}, "no 'answer'"),
        ({"question": "q", "answer": None}, "no 'answer'"),
        ({"question": "q", "answer": True}, "must be text"),
        ({"question": "q", "answer": ["1", None]}, "must be text"),
        ({"question": "q", "answer": "so\n####  "}, "nothing after"),
    ],
)
def test_a_bad_row_is_named_or_counted(tmp_path, bad, reason):
    path = write(tmp_path / "d.jsonl", [GSM8K, bad, GSM8K])
    with pytest.raises(DataError, match=rf"d\.jsonl:2: .*{reason}"):
        load_rows(path)
    rows, report = load_rows(path, on_bad_row="skip")
    assert len(rows) == report.kept == 2 and report.bad == 1
    assert "d.jsonl:2" in report.reasons[0] and reason in report.reasons[0]


def test_bytes_that_are_not_utf8_are_a_bad_row_not_a_bad_file(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(json.dumps(GSM8K).encode() + b'\n{"question": "\xff", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"d\.jsonl:2: not UTF-8"):
        load_rows(path)


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        load_rows(tmp_path / "absent.jsonl")
    with pytest.raises(DataError, match="expected a name ending"):
        load_rows(write(tmp_path / "d.txt", ["q,a"]))
    for name in ("e.jsonl", "e.json", "e.csv", "e.jsonl.gz"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(DataError, match="it is empty"):
            load_rows(tmp_path / name)
    with pytest.raises(DataError, match=r"no usable row; first of 1 bad ones: .*b\.jsonl:1"):
        load_rows(write(tmp_path / "b.jsonl", ["x"]), on_bad_row="skip")
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(write(tmp_path / "w.jsonl.gz", [GSM8K] * 20).read_bytes()[:-12])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz: not a whole gzip"):
        load_rows(cut)
    with pytest.raises(ValueError, match="on_bad_row"):
        load_rows(write(tmp_path / "g.jsonl", [GSM8K]), on_bad_row="ignore")


def test_long_prompts_are_dropped_and_counted(tmp_path):
    path = write(
        tmp_path / "d.jsonl", [{"question": "q" * n, "answer": "1"} for n in (3, 4, 5, 6)] + ["bad"]
    )
    prompts, report = load_prompts(
        path, lambda q: list(range(len(q))), max_prompt_tokens=4, on_bad_row="skip"
    )
    assert [len(p.tokens) for p in prompts] == [3, 4]
    assert (report.kept, report.too_long, report.bad) == (2, 2, 1)
    with pytest.raises(DataError, match="max_prompt_tokens = 2"):
        rows_to_prompts(load_rows(path, "skip")[0], lambda q: list(range(len(q))), 2)
