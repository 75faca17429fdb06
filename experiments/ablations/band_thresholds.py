"""Balanced online difficulty filtering: which band of pass rates to train on (Table 1 and Figure 2
of the paper).

    python experiments/ablations/band_thresholds.py
        (about 30 minutes on two cores, computed from seconds per step)

Paper: balanced bands beat plain GRPO in accuracy, with fewer updates and in less time.
Expect: every band that leaves out 0 and 1 needs far fewer steps than plain GRPO, whose groups are
mostly constant. Narrow bands reject nearly all prompts after 24 samples each: more samples a step,
hence slower in samples and seconds. Skewed bands accept more prompts, many of them constant groups.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    BY_CLASS,
    SAMPLES,
    SECONDS,
    Bars,
    Column,
    held_out,
    per_step,
    step_seconds,
)

BALANCED = ((0.0, 1.0), (0.1, 0.9), (0.2, 0.8), (0.3, 0.7), (0.4, 0.6))
# Of a skewed band the end that filters nothing is inside.
OVER = ((0.0, 1.0), (0.2, 1.0), (0.4, 1.0))
UNDER = ((0.0, 1.0), (0.0, 0.8), (0.0, 0.6))

ABLATION = Ablation(
    name="band_thresholds",
    title="Balanced online difficulty filtering: thresholds",
    source="Bae et al. (arXiv 2504.03380), Table 1 and Figure 2",
    variants={
        "grpo": "grpo",
        **{
            f"{low:g} {left} p {right} {high:g}": (
                f"band_grpo@rule.inclusive={inclusive}@rule.low={low:g}@rule.high={high:g}"
            )
            for bands, left, right, inclusive in (
                (BALANCED, "<", "<", "neither"),
                (OVER, "<", "<=", "high"),
                (UNDER, "<=", "<", "low"),
            )
            for low, high in bands
        },
    },
    tables=(
        Table("Accuracy (Table 1)", (ACCURACY, *BY_CLASS)),
        Table(
            "Cost",
            (
                SAMPLES,
                SECONDS,
                Column("samples a step", per_step("generated_samples"), 0),
                Column("share accepted", per_step("acceptance")),
                Column("s a step", step_seconds),
            ),
        ),
    ),
    panels=(
        held_out("step"),
        held_out("samples"),
        Bars("share of prompts accepted", per_step("acceptance")),
    ),
    # In a narrow band nearly everything is rejected: let a step go on until its batch is full.
    settings={"driver.max_calls": 64},
    steps=100,
)

if __name__ == "__main__":
    main(ABLATION)
