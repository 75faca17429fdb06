"""RPO: tokens and time over the window L and the group size G (Table 3 and Figure 3 of the paper).

    python experiments/ablations/rpo_window.py
        (about 20 minutes on two cores, computed from seconds per step)

The paper's L of 300, 500 and 800 tokens are 2, 4 and 8 here, where a response has at most 16.

Paper: time falls with smaller L.
Expect: sampled tokens grow with L towards those without replay. Generation takes as many decode
steps as the longest suffix, and a batch always has rambling responses: time falls less than tokens.
Small L, and half_min, learn little: an answer of one or two digits is then replayed whole, and only
its end token is sampled. With G both time and tokens grow in proportion.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    SECONDS,
    Bars,
    Column,
    held_out,
    per_step,
    ratio,
    step_seconds,
)

WINDOWS = {
    **{f"L = {n}": f"@replay.window=fixed@replay.length={n}" for n in (2, 4, 8)},
    "L = half_min": "@replay.window=half_min",
    "L = min": "",
}

ABLATION = Ablation(
    name="rpo_window",
    title="RPO: time over the window L and the group size G",
    source="RPO, Table 3 and Figure 3",
    variants={
        "GRPO, G = 24": "grpo",
        **{f"{name}, G = 24": f"rpo_grpo{change}" for name, change in WINDOWS.items()},
        **{
            f"{name}, G = {n}": f"{spec}@rule.n={n}"
            for n in (12, 48)
            for name, spec in (("GRPO", "grpo"), ("L = min", "rpo_grpo"))
        },
    },
    tables=(
        Table(
            "Time and tokens a step",
            (
                Column("s a step", step_seconds),
                Column("generation (ms)", per_step("time/generate", 1e-3), 1),
                Column("update (ms)", per_step("time/update", 1e-3), 1),
                Column("decode steps", per_step("decode_steps"), 0),
                Column(
                    "sampled tokens a sample", ratio("generated_tokens", "generated_samples"), 2
                ),
                SECONDS,
                ACCURACY,
            ),
        ),
    ),
    panels=(
        Bars("sampled tokens a sample", ratio("generated_tokens", "generated_samples")),
        Bars("s a step", step_seconds),
        held_out("train_s"),
    ),
    settings={"data.train_prompts": 1024},
)

if __name__ == "__main__":
    main(ABLATION)
