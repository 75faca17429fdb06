"""SPEED-REINFORCE on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_speed_reinforce.py --workdir=runs/speed_reinforce
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("speed_reinforce")
