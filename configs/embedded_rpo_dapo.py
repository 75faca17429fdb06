"""RPO with DAPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_rpo_dapo.py --workdir=runs/rpo_dapo
Expect:  held-out accuracy from 0.369 to 0.548 in 120 steps with seed 0, 28.71 M generated tokens; 520 s on two shared cores.
         Late in the run nearly all groups are constant: 142,918 prompts are screened for 1,897 groups.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("rpo_dapo")
