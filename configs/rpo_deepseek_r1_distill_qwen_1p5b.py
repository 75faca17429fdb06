"""RPO's settings for DeepSeek-R1-Distill-Qwen-1.5B (Yi et al.).

Launch:  python experiments/train.py --config=configs/rpo_deepseek_r1_distill_qwen_1p5b.py
             --workdir=runs/rpo --config.model.path=DIRECTORY
         python experiments/train.py
             --config=configs/rpo_deepseek_r1_distill_qwen_1p5b.py:rpo_dapo,500,length_aware ...
Expect:  not run at this scale yet; what it takes of an H100's or a TPU's memory stands in
         experiments/results/targets/presets.md.

Variants, up to three words with commas between: rpo_grpo (if none is named), rpo_dapo,
rpo_grpo_released, grpo, dapo; how far back a rollout may start, half_min (if none is named), min,
or 300, 500, 800 tokens; length_aware, the paper's shaped reward. Training questions are the 7,000
of open-rs.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.RPO


def get_config(variant: str = "") -> Config:
    return presets.rpo("DeepSeek-R1-Distill-Qwen-1.5B", variant, devices=2)
