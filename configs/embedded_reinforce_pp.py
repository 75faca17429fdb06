"""REINFORCE++ on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_reinforce_pp.py --workdir=runs/reinforce_pp
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("reinforce_pp")
