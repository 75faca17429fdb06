"""SPEED-RLOO and RLOO from the same start: seconds to a held-out accuracy, on the embedded tasks
and, where its directory is given, on arithmetic with SmolLM2-135M-Instruct's own weights.
"""

import json
from pathlib import Path

import common
import numpy as np

from lab.comparison import runs
from rl_speed.config import Config, methods, presets

METHODS = ("rloo", "speed_rloo")
# Held-out accuracy to reach, which both reached on CPUs; nobody knows SmolLM2's.
TARGETS = {"chain": 0.45, "scratchpad": 0.6}
UNKNOWN = 0.05  # above the start, where no target is known


def embedded(task: str, small: bool) -> Config:
    config = presets.embedded(task=task)
    config.training.steps = 150
    config.evaluation.every = 5
    return presets.tiny(config, steps=2, evaluate_every=1, train_prompts=64) if small else config


def arithmetic(path: Path, count: int, seed: int) -> str:
    """Write sums, differences and products of one and two digits, a JSON object a line."""
    rng = np.random.default_rng(seed)
    work = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
    lines = []
    for _ in range(count):
        b, a = sorted(rng.integers(2, 100, 2).tolist())
        sign = str(rng.choice(list(work)))
        question = f"What is {a} {sign} {b}? Reply with the number only."
        lines.append(json.dumps({"question": question, "answer": str(work[sign](a, b))}))
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def smollm2(path: str, scratch: Path, small: bool) -> Config:
    """Without a cold start."""
    config = presets.language_model(path, "numina", "chat", max_prompt=64, max_new=24, devices=1)
    config.data.train = arithmetic(scratch / "train.jsonl", 1200, seed=0)
    config.data.eval = arithmetic(scratch / "held_out.jsonl", 160, seed=1)
    config.reward.verifier = "integer"
    config.reward.mode = "free"
    config.training.steps = 20
    config.evaluation.every = 5
    return presets.tiny(config, steps=1, evaluate_every=1) if small else config


def compare(found: common.Result, setting: common.Setting, task: str, config: Config) -> None:
    """Both methods, one run each."""
    for method in METHODS:
        name = f"{task}, {method}"
        with found.attempt(name):
            variant = runs.Variant(method)
            folder = setting.scratch / "method" / task / method
            one = methods.of(config)(method)
            one.logging.export = one.logging.tensorboard = False
            runs.train(one, folder)
            run = runs.load_run(variant, one.seed, folder)
            seconds, accuracy = run.curve("train_s")
            target = TARGETS.get(task, round(float(accuracy[0]) + UNKNOWN, 3))
            found.figures |= {
                f"{name}: seconds to {target}": run.reaches(target, "train_s"),
                f"{name}: accuracy before": float(accuracy[0]),
                f"{name}: accuracy at the end": float(accuracy[-1]),
                f"{name}: seconds of all steps": float(seconds[-1]),
                f"{name}: seconds of the run, compiling": run.wall_s,
            }
            least = 0.0 if setting.small else TARGETS.get(task, 0.0)
            found.at_least(f"{name}: best accuracy", accuracy.max(), least)


def run(setting: common.Setting, found: common.Result) -> None:
    for task in ("chain", "scratchpad"):
        compare(found, setting, task, embedded(task, setting.small))
    if setting.smol:
        config = smollm2(setting.smol, setting.scratch, setting.small)
        compare(found, setting, "SmolLM2-135M", config)
    else:
        found.figures["SmolLM2-135M"] = "not run: --smol names no directory"


if __name__ == "__main__":
    common.main(run)
