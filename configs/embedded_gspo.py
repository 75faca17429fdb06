"""GSPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_gspo.py --workdir=runs/gspo
Expect:  see README.md, "Results".
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("gspo")
