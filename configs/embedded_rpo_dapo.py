"""RPO with DAPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_rpo_dapo.py --workdir=runs/rpo_dapo
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("rpo_dapo")
