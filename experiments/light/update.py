"""The update at Qwen2.5-1.5B's shape on ragged rows: tokens a second and model FLOP/s utilisation
of the tokens held, beside torch (sdpa, bfloat16 autocast; padded and packed) on the same device.
"""

import json
import subprocess
import sys

import chip
import common
import jax
import numpy as np
from sampling import TORCH

from rl_speed.mesh import make_mesh
from rl_speed.policy import ModelConfig, init, num_params, param_shardings, save_hf
from rl_speed.sampling import Batch
from rl_speed.update.optimizer import OptimizerConfig, make_optimizer
from rl_speed.update.state import init_state, state_shardings
from rl_speed.update.step import UpdateConfig, make_update


def batch(small: bool, vocabulary: int) -> Batch:
    """Rows of up to 4,096 tokens (64 in small), lengths uniform from an eighth of it."""
    rows, width, prompt = (8, 64, 4) if small else (32, 4096, 256)
    rng = np.random.default_rng(0)
    lengths = rng.integers(width // 8, width + 1, rows).astype(np.int32)
    mask = np.arange(1, width) < lengths[:, None]
    mask[:, : prompt - 1] = False
    return Batch(
        tokens=rng.integers(1, vocabulary, (rows, width)).astype(np.int32),
        mask=mask,
        behaviour_logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        rewards=(np.arange(rows) % 2).astype(np.float32),
        group_ids=(np.arange(rows) // 2).astype(np.int32),
        lengths=lengths,
    )


def flops(model: ModelConfig, lengths: np.ndarray) -> float:
    """Operations of one forward and backward pass on the tokens held, nothing recomputed: 6 a
    weight and token, and causal attention (PaLM, appendix B).
    """
    weights = num_params(model) - model.width * (2 * model.layers + 1)
    if not model.tie_embeddings:
        weights -= model.vocab_size * model.width
    lengths = lengths.astype(np.float64)
    attention = 6 * model.layers * model.heads * model.head_dim * (lengths**2).sum()
    return 6 * weights * lengths.sum() + attention


def run(setting: common.Setting, found: common.Result) -> None:
    model = setting.model(remat=not setting.small)
    data = batch(setting.small, model.vocab_size)
    tokens, work = int(data.lengths.sum()), flops(model, data.lengths)
    rate = chip.product(setting.small)
    mesh = make_mesh()
    settings = UpdateConfig(
        groups=len(data.rewards) // 2, micro_tokens=128 if setting.small else 16384
    )
    place = param_shardings(model, mesh)
    params = jax.jit(lambda key: init(model, key), out_shardings=place)(jax.random.key(0))
    folder = setting.scratch / "qwen"
    if not (folder / "config.json").is_file():  # part "sampling" did not leave it
        save_hf(folder, params, model)
    optimizer = make_optimizer(OptimizerConfig(total_steps=1000), params)
    state = [init_state(params, optimizer, state_shardings(model, optimizer, mesh))]
    del params
    update = make_update(model, optimizer, mesh, settings)
    advantages = np.where(np.arange(len(data.rewards)) % 2, 1.0, -1.0).astype(np.float32)
    metrics = []

    def call():
        state[0], found_metrics = update(state[0], data, advantages, None, None)
        metrics[:] = [found_metrics]
        return found_metrics["grad_norm"]

    with found.attempt("update"):
        seconds, first = common.seconds_of(call)
        found.figures |= {
            "tokens held": tokens,
            "tokens/s": tokens / seconds,
            "MFU of the measured product": work / seconds / rate,
            "first call, compiling (s)": first,
            "peak memory (bytes)": common.peak_memory(),
        }
        norm = float(np.asarray(metrics[0]["grad_norm"]))
        found.at_most("gradient norm", norm, 1e6)
        found.at_most("MFU of the measured product", work / seconds / rate, 1.0)
    state.clear()
    jax.clear_caches()
    for kind in ("padded", "packed"):
        with found.attempt(f"torch, {kind}"):
            task, out = setting.scratch / "update.npz", setting.scratch / f"update_{kind}.json"
            np.savez(task, rows=data.tokens, lengths=data.lengths)
            command = [sys.executable, str(TORCH), kind, str(folder), str(task), str(out)]
            said = subprocess.run(command, capture_output=True, text=True)
            if said.returncode:
                raise RuntimeError(said.stderr.strip()[-500:])
            theirs = json.loads(out.read_text())
            found.figures |= {f"torch, {kind}: {name}": value for name, value in theirs.items()}
            if "tokens/s" in found.figures:
                ratio = found.figures["tokens/s"] / theirs["tokens/s"]
                found.figures[f"tokens/s of ours / torch, {kind}"] = ratio


if __name__ == "__main__":
    common.main(run)
