"""RPO with GRPO, rollouts that start inside a cached response, on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_rpo_grpo.py --workdir=runs/rpo_grpo
Expect:  held-out accuracy from 0.369 to 0.425 in 120 steps with seed 0, 0.26 M generated tokens; 16 s on two cores. Behind plain
         GRPO (0.497), at half the tokens a sample: most groups that start inside a wrong response stay wrong.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("rpo_grpo")
