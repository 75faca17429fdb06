"""Reinforce-Ada: all its methods against GRPO and DAPO (Tables 2 and 5, Figures 5 and 6 of the
paper), from the same runs.

    python experiments/ablations/ada_methods.py
        (about 25 minutes on two cores, computed from seconds per step)

As in the paper a step takes the same number of prompts (48) whatever a method spends on each; Seq
keeps 4 samples of a pool of up to 32, Est spends 8 on average.

Paper: adaptive sampling converges faster and ends higher than GRPO, `balance` more so than `pos`.
Expect: GRPO gains with n because more groups are informative. Seq-balance draws nearly all of its
32 samples for most prompts (28 on average at the start: what is always right never resolves, nor
what is hopeless), Seq-pos those of hopeless prompts alone; both have informative groups wherever
one in 32 samples is right. Est has GRPO-8's budget and moves it to hard prompts, of which the
hopeless ones take most. By difficulty: "middle" first for all, "long" for those that spend where
signal is scarce. Entropy is measured on held-out prompts: on those trained on it tells which
prompts a method picks, ramblers at 2.3 nats or others.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    BY_CLASS,
    SAMPLES,
    SECONDS,
    Column,
    final,
    held_out,
    last_steps,
    pass_at,
    pass_at_curve,
    pass_rate_share,
    per_step,
    ratio,
    training,
)

ABLATION = Ablation(
    name="ada_methods",
    title="Reinforce-Ada: methods, sampling dynamics, difficulty classes, entropy and pass@k",
    source="Reinforce-Ada, Tables 2 and 5, Figures 5 and 6",
    variants={
        **{f"GRPO-{n}": f"grpo@rule.n={n}" for n in (4, 8, 16)},
        "DAPO-8": "dapo",
        "Seq-pos": "ada_seq_pos@driver.groups=48",
        "Seq-balance": "ada_seq_balance@driver.groups=48",
        "Est-EMA": "ada_est_ema",
        "Est-value": "ada_est_value",
    },
    tables=(
        Table(
            "Accuracy against samples (Table 2)",
            (ACCURACY, Column("pass@32", final("eval/pass_at_32")), SAMPLES, SECONDS),
        ),
        Table(
            "Sampling dynamics (Figure 5), per step",
            (
                Column("samples a trained prompt", ratio("generated_samples", "groups"), 1),
                Column("informative groups", per_step("informative_groups")),
                Column("first-round accuracy, end", last_steps("first_accuracy")),
                Column("prompts screened", per_step("screened"), 0),
            ),
        ),
        Table("Held-out accuracy by difficulty (Table 5)", BY_CLASS),
        Table(
            "Entropy and pass@k (Figure 6)",
            (
                Column("held-out entropy (nats)", final("eval/entropy")),
                Column("middle alone", final("eval/entropy_middle")),
                *(Column(f"pass@{k}", pass_at(k)) for k in (1, 4, 16, 32)),
            ),
        ),
    ),
    panels=(
        held_out("samples"),
        held_out("step"),
        training("informative_groups", "informative groups (share)"),
        training(lambda r: r["generated_samples"] / r["groups"], "samples a trained prompt"),
        training(pass_rate_share(0), "prompts with no right first-round sample (share)"),
        held_out("step", "eval/entropy", "held-out entropy (nats a token)"),
        held_out("eval/entropy"),
        pass_at_curve(1.0, "pass@k at the end"),
        held_out("step", "eval/accuracy_long", "held-out accuracy, long"),
    ),
    # Set before a method is applied: 48 prompts of 8. Seq has 4 rows a prompt, and would be given
    # 96 prompts to make up for it.
    settings={
        "rule.n": 8,
        "driver.groups": 48,
        "data.train_prompts": 2048,
        "evaluation.samples": 32,
        "evaluation.every": 20,
    },
    steps=200,
)

if __name__ == "__main__":
    main(ABLATION)
