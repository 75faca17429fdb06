"""RPO with SPEED-RLOO: replayed prefixes under SPEED's screening, on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_rpo_speed_rloo.py --workdir=runs/rpo_speed_rloo
Expect:  held-out accuracy from 0.369 to 0.551 in 80 steps with seed 0, 0.79 M generated tokens; 25 s on two shared cores.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("rpo_speed_rloo")
