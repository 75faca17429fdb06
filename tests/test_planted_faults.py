"""The list of planted faults fits the tree, and the command that plants them tells what is caught
from what is not.
"""

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from planted import run
from planted.faults import FAULTS, Fault


def test_every_fault_can_be_planted(repo):
    assert not run.problems(FAULTS, repo)
    rooms = {fault.room for fault in FAULTS}
    assert len(FAULTS) >= 90 and rooms >= {
        "sampling",
        "objectives",
        "update",
        "memory",
        "rewards",
        "checkpoints",
    }


def test_a_list_that_does_not_fit_is_said(tmp_path):
    (tmp_path / "rl_speed").mkdir()
    (tmp_path / "rl_speed" / "sums.py").write_text("a = 1\nb = 1\n")
    fault = lambda name, old="a = 1", new="a = 2", file="sums.py": Fault(
        "room", name, file, old, new, "test_sums.py", "Harm."
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_sums.py").touch()
    wrong = [
        fault("twice"),
        fault("twice"),
        fault("gone", "c"),
        fault("two places", "1"),
        fault("no file", file="other.py"),
        fault("no Python", new="a = ("),
        fault("layout", new="a  =  1"),
    ]
    found = run.problems(wrong, tmp_path)
    for name, said in [
        ("twice", "another fault"),
        ("gone", "stands 0 times"),
        ("two places", "stands 2 times"),
        ("no file", "no rl_speed/other.py"),
        ("no Python", "no Python"),
        ("layout", "the same text"),
    ]:
        assert any(line.startswith(name) and said in line for line in found), (name, found)
    assert not run.problems([fault("fine")], tmp_path)


@pytest.mark.skipif(shutil.which("git") is None, reason="the command copies what git lists")
def test_caught_and_not_caught_are_told_apart_and_finished_runs_kept(tmp_path, capsys):
    tree = tmp_path / "tree"
    (tree / "rl_speed").mkdir(parents=True)
    (tree / "tests").mkdir()
    source = (
        "def larger(a, b):\n    return a if a > b else b\n\n\ndef half(a):\n    return a // 2\n"
    )
    (tree / "rl_speed" / "sums.py").write_text(source)
    test = (
        "from rl_speed.sums import larger\n\n\ndef test_larger():\n    assert larger(1, 2) == 2\n"
    )
    (tree / "tests" / "test_sums.py").write_text(test)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    fault = lambda name, old, new: Fault(
        "sums", name, "sums.py", old, new, "test_sums.py", f"Harm of {name}."
    )
    faults = [fault("smaller", "a > b", "a < b"), fault("a third", "a // 2", "a // 3")]
    command = lambda *more: run.main(
        [f"--results={tmp_path / 'results'}", f"--table={tmp_path / 'table.md'}", *more],
        faults,
        tree,
    )

    assert command() == 1
    said = capsys.readouterr().out
    assert "1 of 2 caught" in said and "not caught: a third" in said
    table = (tmp_path / "table.md").read_text()
    assert "**1 of 2 caught (50.0%)**" in table
    assert "| smaller | sums.py | Harm of smaller. | `test_sums.py::test_larger` |" in table
    assert "| a third | sums.py | Harm of a third. | **not caught** |" in table
    assert (tree / "rl_speed" / "sums.py").read_text() == source  # the tree itself is left alone
    # What is finished is not run again, until the file changes.
    assert command("--only=smaller") == 0 and "[1/1]" not in capsys.readouterr().out
    # Where the tests fail by themselves nothing is told.
    (tree / "tests" / "test_sums.py").write_text(test.replace("== 2", "== 1"))
    assert run.main([f"--results={tmp_path / 'results'}", "--only=a third"], faults, tree) == 2


@pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="processor time is read from /proc"
)
@pytest.mark.parametrize("text,ended", [("while True: pass", False), ("", True)])
def test_what_hangs_is_stopped_by_processor_time(text, ended):
    process = subprocess.Popen([sys.executable, "-S", "-c", text])
    try:
        assert run.wait(process, 1.0, threading.Event())[1] == ended
    finally:
        process.kill()
        process.wait()
