"""Reinforce-Ada on a moderate and on a hard training set (Table 4 of the paper).

    python experiments/ablations/ada_sets.py
        (about 13 minutes on two cores, computed from seconds per step)

Sets are cut from 8,192 prompts by 32 samples of the starting policy each: moderate, pass rates from
0.3 to 0.9; hard, one to seven right of 32. Prompts never solved are in neither.

Paper: compares both sets, as a small group of a hard prompt is mostly all wrong.
Expect: on the moderate set little between methods, nearly every group of 8 is informative; on the
hard set GRPO has few informative groups at first, and Seq-balance many at three times the samples.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    BY_CLASS,
    SAMPLES,
    SECONDS,
    Column,
    held_out,
    per_step,
    training,
)

SETS = {
    "moderate": "data.pass_rates=measured@data.keep_low=0.3@data.keep_high=0.9",
    "hard": "data.pass_rates=measured@data.keep_low=0.03@data.keep_high=0.22",
}
METHODS = {
    "GRPO-8": "grpo",
    "Seq-balance": "ada_seq_balance@driver.groups=48",
    "Est-EMA": "ada_est_ema",
}

ABLATION = Ablation(
    name="ada_sets",
    title="Reinforce-Ada: moderate and hard training sets",
    source="Reinforce-Ada, Table 4",
    variants={
        f"{method}, {name}": f"{spec}@{keep}"
        for name, keep in SETS.items()
        for method, spec in METHODS.items()
    },
    tables=(
        Table(
            "Held-out accuracy and cost",
            (
                ACCURACY,
                *BY_CLASS,
                SAMPLES,
                SECONDS,
                Column("informative groups", per_step("informative_groups")),
            ),
        ),
    ),
    panels=(
        held_out("samples"),
        held_out("step"),
        training("informative_groups", "informative groups (share)"),
    ),
    settings={"rule.n": 8, "driver.groups": 48, "data.train_prompts": 8192, "evaluation.every": 10},
)

if __name__ == "__main__":
    main(ABLATION)
