"""Runs of a comparison in processes of their own."""

import subprocess
import sys
import time


def test_runs_end_with_the_comparison(tmp_path, repo):
    """A comparison that is killed leaves no run that goes on writing."""
    flags = [
        *(f"--config={repo}/configs/embedded.py", "--methods=rloo,grpo", "--processes=2"),
        *("--pass_rate_samples=0", f"--workdir={tmp_path}", "--config.training.steps=100000"),
        *("--config.driver.groups=4", "--config.rule.n=4", "--config.evaluation.every=0"),
        *("--config.checkpoints.every=0", "--config.data.train_prompts=64"),
    ]
    command = [sys.executable, "experiments/compare.py", *flags]
    parent = subprocess.Popen(command, cwd=repo, stdout=subprocess.DEVNULL)
    files = [tmp_path / name / "seed0" / "metrics.jsonl" for name in ("rloo", "grpo")]

    def steps():
        return [len(f.read_text().splitlines()) if f.exists() else 0 for f in files]

    wait_until(lambda: min(steps()) > 2)
    parent.kill()
    parent.wait()
    saved = [f.parent / "checkpoints" for f in files]
    wait_until(lambda: all(any(folder.glob("[0-9]*")) for folder in saved))
    time.sleep(3)
    ended = steps()
    time.sleep(3)
    assert steps() == ended


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)
