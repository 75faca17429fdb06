"""Whole GRPO steps of our trainer on the peers' work, with all that it writes."""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from turns import Turns

from rl_speed.config import Config, methods
from rl_speed.runtime.setup import setup_jax
from rl_speed.training.loop import Trainer


def settings(work: dict[str, Any], folder: Path) -> Config:
    """GRPO as `trl_trainer.py` has it."""
    for name, texts in {"train": work["questions"], "eval": ["A"]}.items():
        rows = [json.dumps({"question": text, "answer": "0"}) + "\n" for text in texts]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    config = methods.apply(Config(), "grpo")
    config.model.path = work["model"]
    config.data.task = "jsonl"
    config.data.prompt = work["template"]
    config.data.train = str(folder / "train.jsonl")
    config.data.eval = str(folder / "eval.jsonl")
    config.data.max_prompt_length = len(work["prompts"][0])
    config.set("rule.n", work["samples"])
    config.driver.groups = work["groups"]
    config.driver.screen_prompts = config.driver.buffer_groups = work["groups"]
    config.sampler.max_new = work["max_new"]
    config.sampler.slots = work["options"]["slots"]
    config.sampler.tail = work["options"]["tail"]
    config.mesh.data = work["options"]["devices"]
    config.reward.verifier = "lab.benchmark.peer_programs.coin:score"
    config.optimizer.learning_rate = 1e-6
    config.training.steps = 1_000_000
    config.evaluation.every = config.checkpoints.every = 0
    config.logging.progress = config.logging.export = False
    return config


class InTurn(Trainer):
    """Held back until it is its turn; answers after each step."""

    def __init__(self, turns: Turns, folder: Path):
        super().__init__(settings(turns.work, folder), folder / "run")
        self.turns = turns

    def begin(self) -> None:
        if self.turns.wait() is None:
            sys.exit()
        self.begun = time.perf_counter()

    def _log(self, record, rollouts):
        super()._log(record, rollouts)
        self.turns.answer(
            seconds=time.perf_counter() - self.begun,
            tokens=int(record["rollout/generated_tokens"]),
            padding=record["train/padding"],
        )
        self.begin()


def main(turns: Turns) -> None:
    setup_jax(turns.work["options"]["devices"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = InTurn(turns, Path(folder))
        trainer.begin()
        trainer.run()


if __name__ == "__main__":
    main(Turns())
