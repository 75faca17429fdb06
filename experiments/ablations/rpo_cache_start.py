"""RPO: what it costs to start the cache with a response to every question (Table 9 of the paper),
and what it brings.

    python experiments/ablations/rpo_cache_start.py
        (about 9 minutes on two cores, computed from seconds per step)

Paper: one response a question, drawn once, is cheap beside training.
Expect: 1,024 responses are as many samples as three steps of training (seconds, of which most is
compilation at this scale). A cache that starts empty is filled as questions are visited: after an
epoch, 64 of 240 steps, both go on alike.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table, start_cost
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    SAMPLES,
    SECONDS,
    TOKENS,
    Column,
    held_out,
    ratio,
    training,
)

ABLATION = Ablation(
    name="rpo_cache_start",
    title="RPO: the start of the cache",
    source="RPO, Table 9",
    variants={
        "GRPO": "grpo",
        "empty cache": "rpo_grpo@replay.start=empty",
        "one response a question": "rpo_grpo@replay.start=empty@replay.cache=measured",
    },
    tables=(
        Table(
            "The start, and the run that follows",
            (
                Column("start: responses", start_cost("sampled"), 0),
                Column("start: tokens (thousands)", start_cost("tokens", 1e3), 0),
                Column("start: s, with compilation", start_cost("seconds"), 1),
                SAMPLES,
                TOKENS,
                SECONDS,
                Column(
                    "sampled tokens a sample", ratio("generated_tokens", "generated_samples"), 2
                ),
                ACCURACY,
            ),
        ),
    ),
    panels=(
        held_out("step"),
        held_out("tokens"),
        training("prefix", "replayed tokens a trained sample"),
    ),
    # As in the paper, a prompt comes back four times in a run.
    settings={"data.train_prompts": 1024},
    steps=240,
)

if __name__ == "__main__":
    main(ABLATION)
