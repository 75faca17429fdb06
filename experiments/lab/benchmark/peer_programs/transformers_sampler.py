"""transformers' `generate` on the peers' work: torch, with a cache of its own, all rows at once."""

import numpy as np
import torch
import transformers
from turns import Turns


def main(turns: Turns) -> None:
    work = turns.work
    torch.set_num_threads(work["processors"])
    policy = transformers.AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=torch.float32
    ).eval()
    prompts = torch.tensor(work["prompts"])
    settings = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        num_return_sequences=work["samples"],
        max_new_tokens=work["max_new"],
        eos_token_id=work["ends"],
        pad_token_id=0,
    )

    def call(turn: int):
        torch.manual_seed(turn)
        with torch.inference_mode():
            rows = policy.generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=settings
            )
        is_end = np.isin(rows[:, prompts.shape[1] :].numpy(), work["ends"])
        lengths = np.where(is_end.any(1), is_end.argmax(1) + 1, is_end.shape[1])
        return {"tokens": int(lengths.sum()), "steps": is_end.shape[1]}

    turns.serve(call)


if __name__ == "__main__":
    main(Turns())
