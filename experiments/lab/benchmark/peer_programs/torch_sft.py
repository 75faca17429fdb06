"""Supervised steps of transformers' model on the peers' work: torch, padded rows, AdamW."""

import torch
import transformers
from turns import Turns


def main(turns: Turns) -> None:
    work = turns.work
    size = work["groups"] * 2
    torch.set_num_threads(work["processors"])
    policy = transformers.AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
    policy.train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6)

    def call(turn: int):
        first = turn * size % len(work["rows"])
        rows = work["rows"][first : first + size]
        longest = max(len(prompt) + len(response) for prompt, response in rows)
        ids = torch.zeros(size, longest, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for i, (prompt, response) in enumerate(rows):
            held = len(prompt) + len(response)
            ids[i, :held] = torch.tensor(prompt + response)
            labels[i, len(prompt) : held] = ids[i, len(prompt) : held]
            mask[i, :held] = 1
        loss = policy(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"tokens": int(mask.sum()), "loss": float(loss)}

    turns.serve(call)


if __name__ == "__main__":
    main(Turns())
