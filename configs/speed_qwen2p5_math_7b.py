"""SPEED-RL's settings for Qwen2.5-Math-7B (Zhang et al., arXiv 2506.09016, section 5).

Launch:  python experiments/train.py --config=configs/speed_qwen2p5_math_7b.py --workdir=runs/speed
             --config.model.path=DIRECTORY
         python experiments/train.py
             --config=configs/speed_qwen2p5_math_7b.py:speed_dapo,deepscaler ...
Expect:  not run at this scale yet. --dry_run, on CPU devices, counts 57.6 GiB for generation and
         72.0 GiB for the update on each of its 8 devices.

Variants: those of speed_qwen2p5_math_1p5b.py.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.SPEED


def get_config(variant: str = "") -> Config:
    return presets.speed("Qwen2.5-Math-7B", variant, devices=8)
