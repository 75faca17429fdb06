"""Are the plans honest? Memory beside `--dry_run`'s figure and seconds beside its estimates, of
whole SPEED-RLOO steps at Qwen2.5-1.5B's shape with random weights.
"""

import dataclasses
import json

import chip
import common
import jax

from lab.benchmark import scale
from rl_speed.targets import CHIPS
from rl_speed.training.dry_run import dry_run, made_of
from rl_speed.training.estimates import summary

# Memory planned and measured, and seconds planned and measured, agree within these factors.
MEMORY, SECONDS = 1.25, 4.0


def nearest_chip():
    """The listed chip that this device is; None where it is none of them."""
    limits = chip.published()
    return next((c for c in CHIPS.values() if limits == (c.bandwidth, c.flops)), None)


def run(setting: common.Setting, found: common.Result) -> None:
    work = scale.SMALL if setting.small else scale.ACCELERATOR
    work = dataclasses.replace(
        work, model=dataclasses.replace(work.model, platform=jax.default_backend()), steps=1
    )
    config = work.config()
    folder = setting.scratch / "plan"
    folder.mkdir(parents=True, exist_ok=True)
    shape = {**work.model.to_hf(), "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(shape))
    config.model.path = str(folder / "config.json")
    config.model.compute_dtype, config.model.remat = work.model.dtype, work.model.remat
    planned = dry_run(config)
    by_name = {program.name: program for program in planned.programs}
    measured = scale.run(work, 1, lambda text: print(text, flush=True))["steps"][-1]
    for phase, program in (("generate", "generation"), ("update", "update")):
        held, plan = measured["memory"][phase], by_name[program].total
        found.figures[f"{program}: planned memory (bytes)"] = plan
        if held is None:
            found.figures[f"{program}: peak memory (bytes)"] = "this platform does not tell"
            continue
        found.figures[f"{program}: peak memory (bytes)"] = held
        found.at_most(f"{program}: peak / planned memory", held / plan, MEMORY)
    found.figures |= {f"seconds, {name}": s for name, s in measured["seconds"].items()}
    listed = nearest_chip()
    if listed is None:
        found.figures["estimates"] = "none: this device is not in targets.CHIPS"
        return
    units = made_of(config, work.model, planned.programs, planned.pieces, listed)
    estimates = summary(config, planned.pieces, units)
    decode = estimates["decode step"].bound * measured["decode_steps"]
    for name, seconds, bound in (
        ("decoding", measured["seconds"]["generate"], decode),
        ("update", measured["seconds"]["update"], estimates["update"].bound),
    ):
        found.figures[f"{name}: bound by the chip's limits (s)"] = bound
        found.at_most(f"{name}: measured / bound", seconds / bound, SECONDS)
        found.at_least(f"{name}: measured / bound", seconds / bound, 0.9)


if __name__ == "__main__":
    common.main(run)
