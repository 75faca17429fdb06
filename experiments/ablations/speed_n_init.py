"""SPEED: 4, 6 or 8 screening samples of 24, and where the time of a step goes (Figure 5 of the
paper, and its note on inference).

    python experiments/ablations/speed_n_init.py
        (about 11 minutes on two cores, computed from seconds per step)

Paper: all three beat RLOO, and which is best depends on the target; inference takes about twice the
time of training (7B).
Expect: two to three times fewer steps to the target than RLOO for all three. More screening samples
miss fewer informative prompts and pay more for hopeless ones: 4 needs the fewest tokens. The model
is so small that updates take longer than generation.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import ACCURACY, Bars, Column, held_out, per_step, reaches

TARGET = 0.54

ABLATION = Ablation(
    name="speed_n_init",
    title="SPEED: number of screening samples, and generation against training",
    source="SPEED-RL (arXiv 2506.09016), Figure 5; inference against training time, section 5",
    variants={
        **{f"N_init = {n}": f"speed_rloo@rule.n_init={n}" for n in (4, 6, 8)},
        "rloo": "rloo",
    },
    tables=(
        Table(
            f"To a held-out accuracy of {TARGET}",
            (
                Column("steps", reaches(TARGET, "step"), 0),
                Column("training (s)", reaches(TARGET, "train_s"), 1),
                Column("tokens (thousands)", reaches(TARGET, "tokens", 1e3), 0),
                ACCURACY,
            ),
        ),
        Table(
            "A step",
            (
                Column("generation (ms)", per_step("time/generate", 1e-3), 1),
                Column("update (ms)", per_step("time/update", 1e-3), 1),
                Column("samples", per_step("generated_samples"), 0),
                Column("share accepted", per_step("acceptance")),
                Column("informative groups", per_step("informative_groups")),
                Column("gradient norm", per_step("grad_norm"), 4),
            ),
        ),
    ),
    panels=(
        held_out("train_s"),
        held_out("tokens"),
        Bars("generation (ms a step)", per_step("time/generate", 1e-3)),
    ),
    steps=240,
)

if __name__ == "__main__":
    main(ABLATION)
