"""RPO with GRPO and DAPO: tokens per sample, accuracy,
and pass@N early and late (Table 2, Figures 7 and 8 of the paper).

    python experiments/ablations/rpo_methods.py
        (about 22 minutes on two cores, computed from seconds per step)

Paper: a fraction of the tokens per sample and of the time, without loss of accuracy.
Expect: about half the tokens of a short sample, and fewer of a rambling one. Time falls less:
prefixes are prefilled, and an update takes what it takes. A wrong prefix cannot be undone, so a
question's first digits are learnt from the rollouts that start near the beginning alone; here,
where every step of an answer counts, accuracy may fall behind.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    SECONDS,
    TOKENS,
    Column,
    final,
    held_out,
    pass_at,
    pass_at_curve,
    per_step,
    ratio,
    step_seconds,
    training,
)

EARLY = 0.25
NS = (1, 4, 16, 32)

ABLATION = Ablation(
    name="rpo_methods",
    title="RPO with GRPO and DAPO: tokens, accuracy, pass@N",
    source="RPO, Table 2, Figures 7 and 8",
    variants={
        "GRPO": "grpo",
        "GRPO + RPO": "rpo_grpo",
        "GRPO + RPO as released": "rpo_grpo_released",
        "DAPO": "dapo",
        "DAPO + RPO": "rpo_dapo",
    },
    tables=(
        Table(
            "Tokens per sample (Table 2)",
            (
                Column(
                    "sampled tokens a sample", ratio("generated_tokens", "generated_samples"), 2
                ),
                Column("replayed tokens a trained sample", per_step("prefix"), 2),
                TOKENS,
                SECONDS,
                Column("s a step", step_seconds),
                ACCURACY,
                Column("held-out length", final("eval/length"), 2),
            ),
        ),
        Table(
            "pass@N early, after a quarter of the steps (Figure 7)",
            tuple(Column(f"pass@{n}", pass_at(n, EARLY)) for n in NS),
        ),
        Table(
            "pass@N late, at the end (Figure 8)", tuple(Column(f"pass@{n}", pass_at(n)) for n in NS)
        ),
    ),
    panels=(
        held_out("step"),
        held_out("tokens"),
        training(
            lambda r: r["generated_tokens"] / r["generated_samples"], "sampled tokens a sample"
        ),
        pass_at_curve(EARLY, "pass@k, a quarter of the way"),
        pass_at_curve(1.0, "pass@k at the end"),
        training("accuracy", "training accuracy"),
    ),
    # As in the paper, a prompt comes back four times in a run.
    settings={"data.train_prompts": 1024, "evaluation.samples": 32, "evaluation.every": 10},
    steps=240,
)

if __name__ == "__main__":
    main(ABLATION)
