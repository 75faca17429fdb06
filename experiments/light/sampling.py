"""Sampling at Qwen2.5-1.5B's shape: tokens a second and the share of the byte bound, by attention
kernel, beside transformers' `generate` on the same weights, prompts, lengths and device.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chip
import common
import jax
import numpy as np

from rl_speed import policy, sampling

TORCH = Path(__file__).with_name("torch_reference.py")


def workload(small: bool) -> dict[str, Any]:
    """Slots, prompts and lengths in tokens. Lengths are geometric: mean a quarter of the room."""
    slots, samples, prompt, room = (8, 4, 16, 32) if small else (256, 4, 512, 1024)
    rng = np.random.default_rng(0)
    count = 2 * slots
    lengths = np.minimum(rng.geometric(4 / room, count), room).astype(np.int32)
    return {"slots": slots, "samples": samples, "prompt": prompt, "room": room, "lengths": lengths}


def tables(work: dict[str, Any], vocabulary: int):
    """Contexts and requests of the workload; no token ends a response, its length does."""
    count = len(work["lengths"])
    prompts = count // work["samples"]
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, vocabulary, (prompts, work["prompt"])).astype(np.int32)
    contexts = sampling.build_contexts(list(tokens), prompts, work["prompt"])
    context = np.arange(count) // work["samples"]
    index = np.arange(count) % work["samples"]
    requests = sampling.build_requests(
        context, context, index, contexts, capacity=count, max_new=work["lengths"]
    )
    return contexts, requests


def sampler_config(work: dict[str, Any]) -> sampling.SamplerConfig:
    return sampling.SamplerConfig(
        slots=work["slots"], max_new=work["room"], end_tokens=(), prefill_chunk=8
    )


def bytes_read(work: dict[str, Any], weights: int, steps: int, token: int) -> int:
    """Fewest bytes that drawing must read: the weights at every step, keys and values of every
    response so far, and each prompt's once for its samples.
    """
    lengths = work["lengths"].astype(np.int64)
    responses = int((lengths * (lengths - 1) // 2).sum()) * token
    prompts = int(lengths.sum()) * work["prompt"] * token // work["samples"]
    return steps * weights + responses + prompts


def generated_by_torch(setting: common.Setting, folder: Path, work, contexts) -> dict[str, Any]:
    """Tokens a second of transformers' `generate`, in a process of its own."""
    task = setting.scratch / "generate.npz"
    rows = np.repeat(np.asarray(contexts.tokens), work["samples"], axis=0)
    np.savez(task, rows=rows, lengths=work["lengths"], batch=work["slots"])
    out = setting.scratch / "generate.json"
    command = [sys.executable, str(TORCH), "generate", str(folder), str(task), str(out)]
    said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode:
        raise RuntimeError(f"the torch reference failed: {said.stderr.strip()[-500:]}")
    return json.loads(out.read_text())


def run(setting: common.Setting, found: common.Result) -> None:
    work = workload(setting.small)
    model = setting.model()
    params = jax.jit(lambda key: policy.init(model, key))(jax.random.key(0))
    contexts, requests = tables(work, model.vocab_size)
    read_rate = chip.bandwidth(setting.small)
    itemsize = 2 if model.dtype == "bfloat16" else 4
    tokens = int(work["lengths"].sum())
    token = 2 * model.layers * model.kv_heads * model.head_dim * itemsize
    kinds = ("dense", "ragged") if jax.default_backend() == "cpu" else ("dense", "ragged", "pallas")
    best = 0.0
    for kind in kinds:
        with found.attempt(f"sampling, {kind}"):
            decoder = policy.decoder(model, attention=policy.DecodeAttention(kind, block=512))
            last = []

            def call(decoder=decoder, last=last):
                key = jax.random.key(2)
                drawn = sampling.sample(
                    decoder, params, contexts, requests, key=key, config=sampler_config(work)
                )
                last[:] = [drawn]
                return drawn.tokens

            seconds, first = common.seconds_of(call, 2)
            drawn = int(np.asarray(last[0].lengths).sum())
            steps = int(last[0].decode_steps)
            least = bytes_read(work, policy.num_params(model) * itemsize, steps, token) / read_rate
            found.figures |= {
                f"{kind}: tokens/s": tokens / seconds,
                f"{kind}: share of the byte bound": least / seconds,
                f"{kind}: decode steps": steps,
                f"{kind}: first call, compiling (s)": first,
            }
            found.at_most(f"{kind}: tokens missing", abs(tokens - drawn), 0)
            found.at_most(f"{kind}: share of the byte bound", least / seconds, 1.1)
            best = max(best, tokens / seconds)
    found.figures["peak memory (bytes)"] = common.peak_memory()
    with found.attempt("transformers generate"):
        folder = setting.scratch / "qwen"
        policy.save_hf(folder, params, model)
        params = None
        jax.clear_caches()
        theirs = generated_by_torch(setting, folder, work, contexts)
        found.figures |= {f"transformers: {name}": value for name, value in theirs.items()}
        found.figures["tokens/s of ours / transformers"] = best / theirs["tokens/s"]


if __name__ == "__main__":
    common.main(run)
