"""RPO: the window L with the length-aware reward's alpha (Figure 6 of the paper).

    python experiments/ablations/rpo_length_reward.py
        (about 11 minutes on two cores, computed from seconds per step)

R = clip(r / (1 + exp(-alpha (l_ref - length))), 0.5, 1), right answers alone. The paper's alpha is
0.01 a token at thousands of tokens; lengths here are a hundredth of that, so that alpha = 1
corresponds to it.

Paper: alpha = 0.01, to shorten responses without loss of accuracy.
Expect: little to shorten. A right answer has one length here, and wrong ones earn nothing either
way; the reward of right answers falls below 1 where they are longer than the group's mean. It is
the ramblers that lengthen l_ref, so right answers are rewarded more there.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    Column,
    final,
    held_out,
    per_step,
    training,
)

ABLATION = Ablation(
    name="rpo_length_reward",
    title="RPO: window L and length-aware reward",
    source="RPO, Figure 6",
    variants={
        f"L = {n}, alpha = {alpha:g}": (
            f"rpo_grpo@replay.window=fixed@replay.length={n}@reward.length_alpha={alpha:g}"
        )
        for n in (4, 8)
        for alpha in (0, 0.1, 1)
    },
    tables=(
        Table(
            "Accuracy and length",
            (
                ACCURACY,
                Column("held-out length (tokens)", final("eval/length"), 2),
                Column("held-out responses cut off", final("eval/truncated")),
                Column("length trained on (tokens)", per_step("length"), 2),
                Column("reward", per_step("reward")),
            ),
        ),
    ),
    panels=(
        held_out("step"),
        held_out("step", "eval/length", "held-out length (tokens)"),
        training("reward", "reward"),
    ),
    settings={"data.train_prompts": 1024},
)

if __name__ == "__main__":
    main(ABLATION)
