"""The command line that all scripts here share."""

import sys
from pathlib import Path

from absl import app, flags, logging

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
        from rl_speed.runtime.setup import setup_jax

        setup_jax()
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.ERROR)
        command = " ".join(["python", f"experiments/ablations/{ablation.name}.py", *sys.argv[1:]])
        workdir = Path(_WORKDIR.value or f"runs/ablations/{ablation.name}")
        try:
            written = run(
                ablation,
                [int(seed) for seed in _SEEDS.value],
                workdir,
                command,
                _STEPS.value,
                _SMOKE.value,
            )
        except (ValueError, OSError) as error:
            logging.error("%s", error)
            sys.exit(2)
        print(written[0].read_text())
        print("written to", *written)

    app.run(start)
