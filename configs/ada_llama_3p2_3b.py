"""Reinforce-Ada's settings for Llama-3.2-3B (Xiong et al.).

Launch:  python experiments/train.py --config=configs/ada_llama_3p2_3b.py --workdir=runs/ada
             --config.model.path=DIRECTORY
         python experiments/train.py --config=configs/ada_llama_3p2_3b.py:ada_seq_pos,paper ...
Expect:  not run at this scale yet.

This model cannot be loaded yet: the policy reads the Qwen2 family only, and refuses Llama by name. The settings are the paper's,
for when it can. Variants: those of ada_qwen2p5_math_1p5b.py.
"""

from rl_speed import presets
from rl_speed.config import Config

VARIANTS = presets.ADA


def get_config(variant: str = "") -> Config:
    return presets.ada("Llama-3.2-3B-Instruct", variant, devices=4)
