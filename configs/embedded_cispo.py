"""CISPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_cispo.py --workdir=runs/cispo
Expect:  see README.md, "Results".
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("cispo")
