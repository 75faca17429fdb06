"""SPEED-DAPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_speed_dapo.py --workdir=runs/speed_dapo
Expect:  see README.md, "Results".
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("speed_dapo")
