"""Reinforce-Ada-Seq, sampling a prompt until it has two right and two wrong answers, on the embedded task.

Launch:  python experiments/train.py --config=configs/embedded_ada_seq_balance.py --workdir=runs/ada_seq_balance
Expect:  held-out accuracy from 0.369 to 0.563 in 120 steps with seed 0, 3.28 M generated tokens; 78 s on two shared cores.
"""

from rl_speed import presets
from rl_speed.config import Config


def get_config() -> Config:
    return presets.embedded("ada_seq_balance")
