"""The same work in torch, as a program of its own: `generate`, and a training step on padded or on
packed rows (sdpa, bfloat16 autocast, gradient checkpointing on a GPU).

    python torch_reference.py generate|padded|packed MODEL TASK.npz OUT.json
"""

import json
import sys
import time

import numpy as np
import torch
import transformers

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def median_seconds(call, repeats: int = 3) -> float:
    """Median of `repeats` calls behind one that warms up."""
    found = []
    for _ in range(repeats + 1):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        found.append(time.perf_counter() - begin)
    return float(np.median(found[1:]))


def load(folder: str, dtype: torch.dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa"
    )
    return model.to(DEVICE)


def generate(folder: str, task) -> dict[str, float]:
    """Batches of as many rows as we have slots; each batch runs to its longest response."""
    model = load(folder, torch.bfloat16 if DEVICE == "cuda" else torch.float32).eval()
    rows, lengths, batch = task["rows"], task["lengths"], int(task["batch"])

    @torch.no_grad()
    def call():
        for first in range(0, len(rows), batch):
            part = torch.as_tensor(rows[first : first + batch].astype(np.int64), device=DEVICE)
            longest = int(lengths[first : first + batch].max())
            settings = transformers.GenerationConfig(
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
                eos_token_id=0,
            )
            model.generate(part, attention_mask=torch.ones_like(part), generation_config=settings)

    seconds = median_seconds(call, 1)
    return {"tokens/s": float(lengths.sum()) / seconds, "seconds": seconds}


def train(folder: str, task, packed: bool) -> dict[str, float]:
    """A step of plain policy gradient with AdamW; tokens held a second."""
    model = load(folder, torch.float32).train()
    if DEVICE == "cuda":
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=DEVICE == "cuda")
    rows, lengths = task["rows"].astype(np.int64), task["lengths"]
    budget = 16384 if DEVICE == "cuda" else 256

    def pieces():
        """Micro-batches: packed rows behind one another, or padded rows sorted by length."""
        order, piece = np.argsort(lengths), []
        for row in order:
            held = [lengths[i] for i in [*piece, row]]
            size = sum(held) if packed else max(held) * len(held)
            if piece and size > budget:
                yield piece
                piece = []
            piece.append(row)
        yield piece

    def call():
        optimizer.zero_grad(set_to_none=True)
        for piece in pieces():
            parts = [rows[i, : lengths[i]] for i in piece]
            if packed:
                ids = torch.as_tensor(np.concatenate(parts))[None]
                positions = torch.as_tensor(np.concatenate([np.arange(len(p)) for p in parts]))
                given = {"position_ids": positions[None].to(DEVICE)}
            else:
                width = max(map(len, parts))
                ids = torch.as_tensor(np.stack([np.pad(p, (0, width - len(p))) for p in parts]))
                mask = np.stack([np.arange(width) < len(p) for p in parts])
                given = {"attention_mask": torch.as_tensor(mask.astype(np.int64)).to(DEVICE)}
            ids = ids.to(DEVICE)
            with torch.autocast(DEVICE, torch.bfloat16):
                logits = model(ids, **given, use_cache=False).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
            )
            (loss / float(lengths.sum())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds = median_seconds(call, 2)
    return {"tokens/s": float(lengths.sum()) / seconds, "seconds": seconds}


if __name__ == "__main__":
    kind, folder, task, out = sys.argv[1:]
    task = np.load(task)
    found = generate(folder, task) if kind == "generate" else train(folder, task, kind == "packed")
    found["torch"] = torch.__version__
    with open(out, "w") as file:
        json.dump(found, file)
