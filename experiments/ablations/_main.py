"""The command line that all scripts here share."""

import sys
from pathlib import Path

from absl import flags

from rl_speed.runtime import entry
from rl_speed.studies.comparison.ablation import Ablation, run

_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds, each used by every variant.")
_STEPS = flags.DEFINE_integer(
    "steps", 0, "RL steps of a run; 0: the ablation's own.", lower_bound=0
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "", "Runs, table.md, table.json and plot.png; default runs/ablations/NAME."
)
_SMOKE = flags.DEFINE_bool(
    "smoke", False, "A tiny run of each variant: does it work at all? The numbers mean nothing."
)


def main(ablation: Ablation) -> None:
    """Parse the flags, run the ablation, print its table and where it was written."""

    def start(_):
        command = " ".join(["python", f"experiments/ablations/{ablation.name}.py", *sys.argv[1:]])
        workdir = Path(_WORKDIR.value or f"runs/ablations/{ablation.name}")
        seeds = entry.numbers("seeds", _SEEDS.value)
        written = run(ablation, seeds, workdir, command, _STEPS.value, _SMOKE.value)
        print(written[0].read_text())
        print("written to", *written)

    entry.run(start)
