"""RPO: how often the best response of a group is the one that is cached (Table 8 of the paper).

    python experiments/ablations/rpo_eps.py
        (about 15 minutes on two cores, computed from seconds per step)

eps is the probability that the response of highest reward is cached; otherwise it is a random other
one of the group. "never" keeps the first response for ever.

Paper: 0.1 is best.
Expect: the larger eps, the more cached responses are right and the higher training accuracy reads,
without better held-out accuracy: a sample that starts near the end of a right answer is right by
itself, its group constant, and teaches nothing.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    BY_CLASS,
    Column,
    held_out,
    last_steps,
    per_step,
    ratio,
    training,
)

ABLATION = Ablation(
    name="rpo_eps",
    title="RPO: probability of caching the best response",
    source="RPO, Table 8",
    variants={
        **{f"eps = {eps:g}": f"rpo_grpo@replay.eps={eps:g}" for eps in (0.0, 0.1, 0.5, 0.9)},
        "never": "rpo_grpo@replay.eps=-1",
    },
    tables=(
        Table(
            "Held-out accuracy, and the cache",
            (
                ACCURACY,
                *BY_CLASS,
                Column("cached and right, end", last_steps("replay/correct")),
                Column("training accuracy, end", last_steps("accuracy")),
                Column("informative groups", per_step("informative_groups")),
                Column(
                    "sampled tokens a sample", ratio("generated_tokens", "generated_samples"), 2
                ),
            ),
        ),
    ),
    panels=(
        held_out("step"),
        training("accuracy", "training accuracy"),
        training("replay/correct", "cached and right (share)"),
    ),
    # Few enough that prompts come back: seven visits in a run.
    settings={"data.train_prompts": 512},
    steps=240,
)

if __name__ == "__main__":
    main(ABLATION)
