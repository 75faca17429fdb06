"""Reinforce-Ada's settings for Qwen2.5-Math-7B (Xiong et al.).

Launch:  python experiments/train.py --config=configs/ada_qwen2p5_math_7b.py --workdir=runs/ada
             --config.model.path=DIRECTORY
         python experiments/train.py --config=configs/ada_qwen2p5_math_7b.py:ada_est_value ...
Expect:  not run at this scale yet; what it takes of four or eight H100 or v5p stands in
         experiments/results/targets/presets.md.

Variants: those of ada_qwen2p5_math_1p5b.py, which also says how pass rates are measured first; a
model has its own.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.ADA


def get_config(variant: str = "") -> Config:
    return presets.ada("Qwen2.5-Math-7B", variant, devices=8)
