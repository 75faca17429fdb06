"""Online filtering against offline curation and an offline schedule (the baselines of Bae et
al., Table 1).

    python experiments/ablations/band_curation.py
        (about 10 minutes on two cores, computed from seconds per step)

Pass rates are measured first, 32 samples of the starting policy on each training prompt (seconds;
in no run's clock). Curation keeps prompts from 0.2 to 0.8; the schedule also goes through them from
easy to hard.

Paper: online filtering beats both: what is of the right difficulty at the start no longer is later.
Expect: curation near the online band for the first steps at a fraction of its samples, then falling
behind: what it keeps is learnt, and the long questions, which come into reach later, were left out.
The schedule adds little.
"""

from _main import main

from rl_speed.studies.comparison.ablation import Ablation, Table
from rl_speed.studies.comparison.measures import (
    ACCURACY,
    BY_CLASS,
    SAMPLES,
    SECONDS,
    held_out,
    training,
)

KEEP = "data.pass_rates=measured@data.keep_low=0.2@data.keep_high=0.8"

ABLATION = Ablation(
    name="band_curation",
    title="Online filtering against offline curation and schedule",
    source="Bae et al. (arXiv 2504.03380), Table 1, baselines",
    variants={
        "grpo": "grpo",
        "curation": f"grpo@{KEEP}",
        "schedule": f"grpo@{KEEP}@data.order=schedule",
        "online, 0.2 to 0.8": "band_grpo",
        "online, least visited first": "band_grpo@data.order=visits",
    },
    tables=(Table("Accuracy and cost", (ACCURACY, *BY_CLASS, SAMPLES, SECONDS)),),
    panels=(
        held_out("step"),
        held_out("samples"),
        training("informative_groups", "informative groups (share)"),
    ),
)

if __name__ == "__main__":
    main(ABLATION)
