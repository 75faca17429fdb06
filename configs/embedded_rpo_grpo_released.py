"""RPO with GRPO as released (prefixes trained on, suffixes no longer than what was cut off), on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_rpo_grpo_released.py --workdir=runs/rpo_grpo_released
Expect:  held-out accuracy from 0.369 to 0.497 in 120 steps with seed 0, 0.42 M generated tokens; 137 s on two shared cores.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("rpo_grpo_released")
