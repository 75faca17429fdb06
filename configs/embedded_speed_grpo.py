"""SPEED-GRPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_speed_grpo.py --workdir=runs/speed_grpo
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("speed_grpo")
