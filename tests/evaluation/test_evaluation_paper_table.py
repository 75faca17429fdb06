"""The command that makes a paper's main table, on the embedded policy and questions of its task."""

import json

import pytest

from rl_speed.config import presets
from rl_speed.data.held_out import parse_files
from rl_speed.evaluation.report import suite_table


@pytest.mark.slow  # the laboratory
def test_every_policy_on_every_benchmark(launch, tmp_path):
    questions = [
        {"question": f"{a}+{b}+{a}", "answer": str((2 * a + b) % 10)}
        for a in range(4)
        for b in (1, 2)
    ]
    for name in ("few", "more"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, questions)))
    command = [
        "experiments/paper_table.py",
        "--paper=speed",
        "--config=configs/evaluation.py:embedded",
        "--policies=first=embedded,second=embedded",
        f"--data=few={tmp_path}/few.jsonl,amc23={tmp_path}/more.jsonl",
        "--only=few,amc23",
        "--limit=6",
        f"--workdir={tmp_path}/table",
    ]
    done = launch(*command)
    assert done.returncode == 0, done.stderr[-2000:]
    text = (tmp_path / "table" / "table.md").read_text()
    assert "| policy | amc23 (average@4) | few | average | by question |" in text
    rows = [line for line in text.splitlines() if line.startswith(("| first", "| second"))]
    first, second = (line.split("|")[2:] for line in rows)
    assert first == second  # one policy under two names
    responses = (tmp_path / "table" / "first" / "amc23" / "responses.jsonl").read_text()
    assert len(responses.splitlines()) == 6 * 4
    wrong = launch(*command[:-3], "--only=minerva", f"--workdir={tmp_path}/table")
    assert wrong.returncode == 2 and "--only=minerva: --paper=speed has dapo1k" in wrong.stderr


def test_averages_are_of_benchmarks_and_of_questions():
    def of(accuracy, questions, samples):
        return {"pass_at": {"1": {"value": accuracy}}, "questions": questions, "samples": samples}

    text = suite_table({"mine": {"large": of(0.5, 30, 1), "small": of(0.1, 10, 16)}})
    assert text.splitlines()[0].startswith("| policy | large | small (average@16) |")
    assert text.splitlines()[-1] == "| mine | 50.0 | 10.0 | 30.0 | 40.0 |"


def test_suites_have_the_benchmarks_of_the_papers():
    found = {
        paper: {one.name: one.samples for one in parse_files(text, "SUITES")}
        for paper, text in presets.SUITES.items()
    }
    assert found["speed"] == {"dapo1k": 0, "math500": 0, "amc23": 4, "aime24": 16, "aime25": 16}
    assert set(found["ada"].values()) == {32} and "aime_like" in found["ada"]
    assert set(found["rpo"]) == set(found["band"]) | {"aime25"}
