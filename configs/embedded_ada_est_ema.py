"""Reinforce-Ada-Est, budgets from decayed counts of each prompt (the paper's hybrid), on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_ada_est_ema.py --workdir=runs/ada_est_ema
Expect:  held-out accuracy from 0.369 to 0.547 in 120 steps with seed 0, 0.46 M generated tokens; 84 s on two shared cores.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("ada_est_ema")
