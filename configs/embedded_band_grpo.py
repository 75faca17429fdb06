"""Balanced online difficulty filtering (GRPO on prompts with a pass rate from 0.2 to 0.8) on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_band_grpo.py --workdir=runs/band_grpo
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("band_grpo")
