"""Reinforce-Ada-Est, budgets from decayed counts as released (gamma 1, no weight), on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_ada_est_ema_released.py --workdir=runs/ada_est_ema_released
Expect:  held-out accuracy from 0.369 to 0.540 in 120 steps with seed 0, 0.48 M generated tokens; 66 s on two shared cores.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("ada_est_ema_released")
