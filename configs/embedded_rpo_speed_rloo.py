"""RPO with SPEED-RLOO: replayed prefixes under SPEED's screening, on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_rpo_speed_rloo.py --workdir=runs/rpo_speed_rloo
Expect:  held-out accuracy from 0.369 to 0.545 in 120 steps with seed 0, 13.52 M generated tokens; 626 s on two shared cores.
         Late in the run nearly all groups are constant: 398,330 prompts are screened for 1,780 groups.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("rpo_speed_rloo")
