"""Dr. GRPO on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_dr_grpo.py --workdir=runs/dr_grpo
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("dr_grpo")
