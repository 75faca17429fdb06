"""Whole GRPO steps of TRL's `GRPOTrainer` on the peers' work."""

import os
import tempfile
import time

import torch
import transformers
from coin import score
from turns import Turns

os.environ["HF_HUB_OFFLINE"] = "1"
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


class InTurn(transformers.TrainerCallback):
    """Holds the trainer back until it is its turn, and answers after each step."""

    def __init__(self, turns: Turns):
        self.turns = turns
        self.tokens = 0
        self.begin = 0.0

    def on_step_begin(self, args, state, control, **_):
        if self.turns.wait() is None:
            os._exit(0)
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.turns.answer(seconds=time.perf_counter() - self.begin, tokens=self.tokens)

    def reward(self, completions, completion_ids, **_):
        self.tokens = sum(map(len, completion_ids))
        return [score(text) for text in completions]


def main(turns: Turns) -> None:
    work = turns.work
    options = turns.work["options"]
    torch.set_num_threads(work["processors"])
    policy = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(work["model"])
    read = [tokenizer(text)["input_ids"] for text in work["texts"][: len(work["prompts"])]]
    if read != work["prompts"]:
        raise ValueError("this version of transformers reads the prompts as other tokens")
    policy.generation_config.eos_token_id = work["ends"]
    rows = work["groups"] * work["samples"]
    clock = InTurn(turns)
    at_once = options["rows"] or rows
    GRPOTrainer(
        model=policy,
        processing_class=tokenizer,
        reward_funcs=clock.reward,
        train_dataset=Dataset.from_dict({"prompt": work["texts"]}),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=at_once,
            gradient_accumulation_steps=rows // at_once,
            gradient_checkpointing=options["recompute"],
            num_generations=work["samples"],
            max_completion_length=work["max_new"],
            max_steps=1_000_000,
            learning_rate=1e-6,
            beta=0.0,
            temperature=1.0,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            generation_kwargs={"eos_token_id": work["ends"]},
        ),
    ).train()


if __name__ == "__main__":
    main(Turns())
