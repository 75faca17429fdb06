"""RPO: do response lengths stay what they are over many steps? (Table 4 of the paper)

    python experiments/ablations/rpo_stability.py
        (about 20 minutes on two cores, computed from seconds per step)

The released code gives a suffix no more tokens than were cut off, so that a cached response can
only become shorter; our default lets it have what the whole response may have.

Paper: lengths stay stable over many steps.
Expect: with the released budget lengths shrink step by step, and responses that were cut too short
stay wrong; by default they follow those without replay.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    Column,
    final,
    held_out,
    last_steps,
    training,
)

ABLATION = Ablation(
    name="rpo_stability",
    title="RPO: lengths over many steps",
    source="RPO, Table 4",
    variants={
        "GRPO": "grpo",
        "GRPO + RPO": "rpo_grpo",
        "GRPO + RPO, released budget": "rpo_grpo@replay.max_new=-1",
        "GRPO + RPO as released": "rpo_grpo_released",
    },
    tables=(
        Table(
            "Lengths and accuracy",
            (
                ACCURACY,
                Column("held-out length (tokens)", final("eval/length"), 2),
                Column("held-out responses cut off", final("eval/truncated")),
                Column("length trained on, end", last_steps("length"), 2),
                Column("held-out entropy (nats)", final("eval/entropy")),
            ),
        ),
    ),
    panels=(
        held_out("step"),
        held_out("step", "eval/length", "held-out length (tokens)"),
        training("length", "length trained on (tokens)"),
    ),
    # Twelve visits of each prompt.
    settings={"data.train_prompts": 768, "evaluation.every": 20},
    steps=600,
)

if __name__ == "__main__":
    main(ABLATION)
