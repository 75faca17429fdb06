"""REINFORCE with the batch's mean as baseline on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_reinforce.py --workdir=runs/reinforce
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("reinforce")
