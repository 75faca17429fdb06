"""Reinforce-Ada-Est: log p by weights, by budgets,
or half by each (Figure 9 of the paper: hybrid against implicit).

    python experiments/ablations/ada_hybrid.py
        (about 12 minutes on two cores, computed from seconds per step)

Implicit: budgets in proportion to 1/p, no weights. Hybrid: 1/sqrt(p) budgets and 1/sqrt(p) weights.
Explicit: equal budgets, 1/p weights. Beside them the budget that has the least variance for plain
reward, sqrt((1-p)/p), and equal budgets without weights.

Paper: takes the hybrid.
Expect: implicit gives hopeless prompts (43% here) most of the budget and learns slowest; explicit
has the noisiest gradient, where a hard prompt's rare right answer weighs most; hybrid between.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    BY_CLASS,
    SAMPLES,
    Column,
    held_out,
    per_step,
    training,
)

NO_WEIGHT = "objective.weight=none"

ABLATION = Ablation(
    name="ada_hybrid",
    title="Reinforce-Ada-Est: hybrid, implicit, explicit",
    source="Reinforce-Ada, Figure 9",
    variants={
        "hybrid": "ada_est_ema",
        "implicit": f"ada_est_ema@estimate.gamma=1.0@{NO_WEIGHT}",
        "explicit": "ada_est_ema@estimate.gamma=0.0@objective.weight=inv_p",
        "variance-optimal": f"ada_est_ema@estimate.form=variance@{NO_WEIGHT}",
        "equal, no weights": f"ada_est_ema@estimate.gamma=0.0@{NO_WEIGHT}",
    },
    tables=(
        Table(
            "Held-out accuracy, and the gradient",
            (
                ACCURACY,
                *BY_CLASS,
                SAMPLES,
                Column("gradient norm", per_step("grad_norm"), 4),
                Column("informative groups", per_step("informative_groups")),
            ),
        ),
    ),
    panels=(
        held_out("samples"),
        training("first_accuracy", "training accuracy, first samples"),
        training("grad_norm", "gradient norm before clipping"),
    ),
    settings={"rule.n": 8, "driver.groups": 48, "data.train_prompts": 2048, "evaluation.every": 10},
    steps=200,
)

if __name__ == "__main__":
    main(ABLATION)
