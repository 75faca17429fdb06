"""Reinforce-Ada-Seq balance with the paper's weight 1/p and entropy bonus, on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_ada_seq_balance_paper.py --workdir=runs/ada_seq_balance_paper
Expect:  held-out accuracy from 0.369 to 0.563 in 120 steps with seed 0, 3.28 M generated tokens; 115 s on two shared cores.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("ada_seq_balance_paper")
