"""RPO with GRPO as released (prefixes trained on, suffixes no longer than what was cut off), on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_rpo_grpo_released.py --workdir=runs/rpo_grpo_released
Expect:  not measured. It starts as embedded_rpo_grpo.py does.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("rpo_grpo_released")
