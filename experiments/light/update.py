"""The update at Qwen2.5-1.5B's shape on ragged rows: tokens a second and model FLOP/s utilisation
of the tokens held, beside torch (sdpa, bfloat16 autocast; padded and packed) on the same device.
"""

import common

from lab.benchmark import scale, train
from rl_speed.policy import ModelConfig


def workload(model: ModelConfig, small: bool) -> train.Workload:
    """Rows of up to 4,096 tokens (in small 64), uniform from an eighth of it."""
    if small:
        return train.Workload(model, 8, 64, micro_tokens=128, prompt=4, shortest=8)
    return train.Workload(model, 32, 4096, micro_tokens=16384, prompt=256, shortest=512)


def ours(setting: common.Setting, found: common.Result) -> None:
    numbers = train.run(workload(setting.model(remat=True), setting.small), 2)
    found.figures |= {
        "tokens held": numbers["tokens"],
        "tokens/s": numbers["tokens_per_s"],
        "MFU of the measured product": numbers["mfu_of_matmul"],
        "MFU of the published peak": numbers["mfu"],
        "first call, compiling (s)": numbers["first_s"],
        "peak memory (bytes)": scale.peak_memory(),
    }
    found.at_most("gradient norm", numbers["grad_norm"], 1e6)
    found.at_most("MFU of the measured product", numbers["mfu_of_matmul"], 1.0)


def theirs(setting: common.Setting, found: common.Result) -> None:
    work = workload(setting.shape, setting.small)  # no device: torch needs its memory
    batch = train.random_batch(work)
    rows = [row[: work.prompt + n] for row, n in zip(batch.tokens, batch.lengths)]
    for kind in ("padded", "packed"):
        with found.attempt(f"torch, {kind}", needs="torch"):
            import torch_reference

            model = torch_reference.made(work.model, setting.scratch / "made")
            rate = torch_reference.trained(model, rows, kind == "packed", work.micro_tokens // 2)
            found.figures[f"torch, {kind}: tokens/s"] = rate
            found.figures[f"tokens/s of ours by torch's, {kind}"] = found.figures["tokens/s"] / rate


if __name__ == "__main__":
    common.main(ours, theirs)
