"""GRPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_grpo.py --workdir=runs/grpo
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("grpo")
