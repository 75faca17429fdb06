"""DAPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_dapo.py --workdir=runs/dapo
Expect:  see README.md, "Results".
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("dapo")
