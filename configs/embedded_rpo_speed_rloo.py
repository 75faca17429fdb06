"""RPO with SPEED-RLOO: replayed prefixes under SPEED's screening, on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_rpo_speed_rloo.py --workdir=runs/rpo_speed_rloo
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("rpo_speed_rloo")
