"""The driver of experiments/first_light.py: what a broken part costs, and what the table says."""

import json
import subprocess
import sys

import pytest

OK = """
import argparse, json, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--write", type=pathlib.Path)
given, _ = parser.parse_known_args()
check = {"name": "error", "value": VALUE, "wanted": "at most 1", "ok": VALUE <= 1}
given.write.write_text(json.dumps({"figures": {"tokens/s": 1234}, "checks": [check]}))
"""
PARTS = ("chip", "right", "sampling", "update", "method", "honest")
BROKEN = {
    "an exception": ("raise ValueError('no such kernel')", "failed", "no such kernel"),
    "a hang": ("import time\ntime.sleep(600)", "timeout", "ended after its"),
    "a wrong number": (OK.replace("VALUE", "7"), "wrong", "error: 7, wanted at most 1"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("part", ["chip", "honest"])
def test_a_broken_part_stops_no_other_and_the_table_says_why(repo, tmp_path, part, how):
    code, status, why = BROKEN[how]
    folder = tmp_path / "parts"
    folder.mkdir()
    for name in PARTS:
        text = code if name == part else OK.replace("VALUE", "0")
        (folder / f"{name}.py").write_text(text)
    out = tmp_path / "out"
    command = [sys.executable, str(repo / "experiments" / "first_light.py"), f"--out={out}"]
    command += ["--small", f"--parts={folder}", "--minutes=0.01", "--least_s=5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    parts = json.loads((out / "first_light.json").read_text())["parts"]
    assert {name: found["status"] for name, found in parts.items()} == {
        name: status if name == part else "ok" for name in PARTS
    }
    page = (out / "first_light.md").read_text()
    assert why in page and (out / "first_light.png").is_file() and "| tokens/s | 1,234 |" in page


@pytest.mark.slow
def test_the_whole_of_it_in_small(repo, tmp_path):
    command = [sys.executable, str(repo / "experiments" / "first_light.py"), f"--out={tmp_path}"]
    done = subprocess.run([*command, "--small", "--minutes=40"], capture_output=True, text=True)
    record = json.loads((tmp_path / "first_light.json").read_text())
    told = {name: (part["status"], part["why"]) for name, part in record["parts"].items()}
    assert done.returncode == 0, told
