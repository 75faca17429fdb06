"""SPEED-RLOO and RLOO on the embedded tasks: seconds to a target; and on SmolLM2-135M, where its
directory is given, arithmetic by its own weights: accuracy before and after, seconds a step.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import common
import numpy as np

from rl_speed.config import presets
from rl_speed.training.loop import Trainer

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
# Task -> held-out accuracy to reach; both start below.
TARGETS = {"chain": 0.45, "scratchpad": 0.6}
LONGEST_S, STEPS = 100.0, 150


def curve(folder: Path) -> list[tuple[float, float]]:
    """(seconds trained, held-out accuracy) of each evaluation of a run."""
    found = []
    for line in (folder / "evaluations.jsonl").read_text().splitlines():
        record = json.loads(line)
        accuracy = next(v for k, v in record.items() if k.rpartition("/")[2] == "accuracy")
        seconds = next(v for k, v in record.items() if k.rpartition("/")[2] == "train_s")
        found.append((float(seconds), float(accuracy)))
    return found


def seconds_to(points: list[tuple[float, float]], target: float) -> float:
    """Seconds at which the curve first reaches the target, linear between evaluations; NaN."""
    for (s0, a0), (s1, a1) in zip(points, points[1:]):
        if a0 < target <= a1:
            return s0 + (s1 - s0) * (target - a0) / (a1 - a0)
    return float("nan")


def embedded(found: common.Result, setting: common.Setting) -> None:
    """Both methods from the same start."""
    for task, target in TARGETS.items():
        for method in ("rloo", "speed_rloo"):
            name = f"{method}, {task}"
            with found.attempt(name):
                config = presets.embedded(method, task)
                config.training.steps, config.evaluation.every = STEPS, 5
                config.logging.export = config.logging.tensorboard = False
                if setting.small:
                    presets.tiny(config, steps=4, evaluate_every=2)
                folder = setting.scratch / "method" / f"{method}_{task}"
                begin = time.perf_counter()
                Trainer(config, folder).run()
                points = curve(folder)
                found.figures |= {
                    f"{name}: seconds to {target}": seconds_to(points, target),
                    f"{name}: accuracy at the end": points[-1][1],
                    f"{name}: seconds of all": time.perf_counter() - begin,
                }
                least = 0.0 if setting.small else target
                found.at_least(f"{name}: best accuracy", max(a for _, a in points), least)


def arithmetic(path: Path, count: int, seed: int) -> None:
    """Sums, differences and products of one and two digits, as JSON lines."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        a, b = (int(n) for n in rng.integers(2, 100, 2))
        sign = str(rng.choice(["+", "-", "*"]))
        a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
        value = {"+": a + b, "-": a - b, "*": a * b}[sign]
        question = f"What is {a} {sign} {b}? Reply with the number only."
        lines.append(json.dumps({"question": question, "answer": str(value)}))
    path.write_text("\n".join(lines) + "\n")


def smollm2(found: common.Result, setting: common.Setting) -> None:
    """RL on arithmetic from the instruct model's own weights, without a cold start."""
    scratch = setting.scratch
    arithmetic(scratch / "train.jsonl", 1200, 0)
    arithmetic(scratch / "held_out.jsonl", 160, 1)
    for method in ("rloo", "speed_rloo"):
        with found.attempt(f"SmolLM2-135M, {method}"):
            folder = scratch / "smol" / method
            fields = {
                "model.path": setting.smol,
                "data.train": scratch / "train.jsonl",
                "data.eval": scratch / "held_out.jsonl",
                "data.task": "jsonl",
                "data.prompt": "chat",
                "reward.verifier": "integer",
                "sampler.max_new": 24,
                "training.steps": 20,
                "evaluation.every": 10,
                "logging.export": False,
            }
            command = [sys.executable, str(TRAIN)]
            command += [f"--config={TRAIN.parents[1]}/configs/forkme.py:{method}"]
            command += [f"--workdir={folder}", *(f"--config.{k}={v}" for k, v in fields.items())]
            said = subprocess.run(command, capture_output=True, text=True)
            if said.returncode:
                raise RuntimeError(said.stderr.strip()[-500:])
            points = curve(folder)
            found.figures |= {
                f"SmolLM2-135M, {method}: accuracy before": points[0][1],
                f"SmolLM2-135M, {method}: accuracy behind 20 steps": points[-1][1],
                f"SmolLM2-135M, {method}: seconds a step": points[-1][0] / 20,
            }


def run(setting: common.Setting, found: common.Result) -> None:
    embedded(found, setting)
    if setting.smol:
        smollm2(found, setting)
    else:
        found.figures["SmolLM2-135M"] = "not run: --smol names no directory"


if __name__ == "__main__":
    common.main(run)
