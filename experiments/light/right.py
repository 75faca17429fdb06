"""Is it right here? Forward passes against the CPU, attention kernels against "dense", the
sampler's log-probs against the trainer's, tokens over orders of requests, steps, kill and resume.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import common
import jax
import jax.numpy as jnp
import numpy as np

from rl_speed import policy, sampling
from rl_speed.config import presets
from rl_speed.training.loop import Trainer

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
# Largest difference of a log-prob (nats). float32 products are asked for in full precision.
LIMITS = {"float32": 1e-3, "bfloat16": 0.25}


def shape(dtype: str, platform: str, layers: int = 4) -> policy.ModelConfig:
    """A policy that is small, and whose head size every kernel accepts."""
    return policy.ModelConfig(
        vocab_size=1024,
        width=256,
        layers=layers,
        heads=4,
        kv_heads=2,
        head_dim=64,
        mlp_width=512,
        dtype=dtype,
        platform=platform,
    )


def forward_passes(found: common.Result) -> None:
    """Log-probs on this device against float32 on the CPU of the same process."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 1024, (4, 128)).astype(np.int32)
    params = jax.tree.map(np.asarray, policy.init(shape("float32", "cpu"), jax.random.key(0)))

    def logprobs(model, device):
        with jax.default_device(device):
            run = jax.jit(lambda params, tokens: policy.sequence_logprobs(params, tokens, model)[0])
            return np.asarray(run(jax.device_put(params, device), jax.device_put(tokens, device)))

    wanted = logprobs(shape("float32", "cpu"), jax.local_devices(backend="cpu")[0])
    here = jax.devices()[0]
    for dtype, limit in LIMITS.items():
        difference = np.abs(logprobs(shape(dtype, here.platform), here) - wanted).max()
        found.at_most(f"forward, {dtype}: largest difference to the CPU (nats)", difference, limit)


def kernels(platform: str) -> tuple[str, ...]:
    """Ways of attending in decoding that this platform has."""
    return ("dense", "ragged") if platform == "cpu" else ("dense", "ragged", "pallas")


def sampled(model, kind: str, order: np.ndarray):
    """(samples by request, token rows, log-probs of the trainer) of 32 requests of 8 prompts."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(8, 1024, n).astype(np.int32) for n in rng.integers(5, 40, 8)]
    contexts = sampling.build_contexts(prompts, 8, 40)
    index = order % 8
    requests = sampling.build_requests(index, index, order // 8, contexts, 32, 64)
    decoder = policy.decoder(model, attention=policy.DecodeAttention(kind))
    config = sampling.SamplerConfig(slots=16, max_new=64, end_tokens=tuple(range(8)))
    params = policy.init(model, jax.random.key(0))
    drawn = sampling.sample(decoder, params, contexts, requests, jax.random.key(2), config)
    tokens, lengths = np.asarray(drawn.tokens), np.asarray(drawn.lengths)
    rows = np.zeros((32, 40 + 64), np.int32)
    for row, context in enumerate(index):
        start = len(prompts[context])
        rows[row, :start] = prompts[context]
        rows[row, start : start + 64] = tokens[row]
    score = jax.jit(lambda p, t: policy.sequence_logprobs(p, t, model)[0])
    scored = np.asarray(score(params, jnp.asarray(rows)))
    trainer = np.zeros_like(np.asarray(drawn.logprobs))
    for row, context in enumerate(index):
        start = len(prompts[context]) - 1
        trainer[row] = scored[row, start : start + 64]
    held = np.arange(64) < lengths[:, None]
    back = np.argsort(order)
    difference = np.where(held, np.asarray(drawn.logprobs) - trainer, 0.0)
    return tokens[back], difference[back], held[back]


def sampler(found: common.Result) -> None:
    """The sampler's log-probs against the trainer's, and the same tokens in any order."""
    order, platform = np.arange(32), jax.default_backend()
    for dtype in ("float32", "bfloat16"):
        model = shape(dtype, platform)
        for kind in kernels(platform):
            with found.attempt(f"sampling, {dtype}, {kind}"):
                tokens, difference, held = sampled(model, kind, order)
                name = f"sampler against trainer, {dtype}, {kind}"
                found.at_most(f"{name}: largest (nats)", np.abs(difference).max(), LIMITS[dtype])
                found.figures[f"{name}: mean (nats)"] = float(np.abs(difference)[held].mean())
                found.figures[f"{name}: KL (nats a token)"] = float(difference[held].mean())
                again, _, _ = sampled(model, kind, np.random.default_rng(3).permutation(32))
                differing = float((again != tokens).any(1).sum())
                found.at_most(f"order of requests, {dtype}, {kind}: rows that differ", differing, 0)


def settings(where: str, steps: int):
    """A run of seconds on the embedded task."""
    config = presets.tiny(presets.embedded("speed_rloo"), steps=steps)
    config.driver.where = where
    return config


def steps(found: common.Result, scratch: Path) -> None:
    """A split and a fused step of the embedded task, with finite losses."""
    for where in ("host", "in_loop"):
        with found.attempt(f"two steps, driver.where={where}"):
            Trainer(settings(where, 2), scratch / f"steps_{where}").run()
            lines = (scratch / f"steps_{where}" / "metrics.jsonl").read_text().splitlines()
            norms = [v for k, v in json.loads(lines[-1]).items() if k.endswith("grad_norm")]
            found.at_least(f"steps, {where}: metrics written", len(lines), 2)
            found.at_most(f"steps, {where}: gradient norm", norms[0], 1e6)


def of_the_clock(field: str) -> bool:
    """Whether a metric tells time, and may differ between two runs."""
    return field.startswith(("time/", "process/")) or field.endswith("train_s")


def resumed(found: common.Result, scratch: Path) -> None:
    """A run killed (SIGKILL) behind its second step goes on with the numbers of a whole one."""

    def start(name: str) -> subprocess.Popen:
        fields = (
            "training.steps=4",
            "checkpoints.every=1",
            "evaluation.every=0",
            "data.eval_prompts=16",
            "driver.groups=4",
            "driver.screen_prompts=8",
            "driver.buffer_groups=8",
            "sampler.slots=32",
            "logging.export=False",
            "logging.tensorboard=False",
        )
        command = [
            sys.executable,
            str(TRAIN),
            "--config",
            f"{TRAIN.parents[1]}/configs/embedded.py:rloo",
        ]
        command += [f"--workdir={scratch / name}", *(f"--config.{field}" for field in fields)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)

    def metrics(name: str) -> list[dict]:
        path = scratch / name / "metrics.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        )

    whole = start("whole")
    if whole.wait() != 0:
        raise RuntimeError(f"train.py ended with status {whole.returncode}")
    killed = start("killed")
    while killed.poll() is None and len(metrics("killed")) < 2:
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    if start("killed").wait() != 0:
        raise RuntimeError("train.py did not go on after the kill")
    clean = [
        [{k: v for k, v in line.items() if not of_the_clock(k)} for line in metrics(name)]
        for name in ("whole", "killed")
    ]
    differing = sum(a != b for a, b in zip(*clean)) + abs(len(clean[0]) - len(clean[1]))
    found.at_most("killed and resumed: steps whose numbers differ", differing, 0)


def run(setting: common.Setting, found: common.Result) -> None:
    with found.attempt("forward"):
        forward_passes(found)
    sampler(found)
    steps(found, setting.scratch / "right")
    with found.attempt("killed and resumed"):
        resumed(found, setting.scratch / "right")


if __name__ == "__main__":
    common.main(run)
