"""Reinforce-Ada's settings for Qwen2.5-Math-1.5B (Xiong et al.).

Launch:  python experiments/train.py --config=configs/ada_qwen2p5_math_1p5b.py --workdir=runs/ada
             --config.model.path=DIRECTORY
         python experiments/train.py --config=configs/ada_qwen2p5_math_1p5b.py:ada_seq_pos,paper ...
Expect:  not run at this scale yet; what it takes of an H100's or a TPU's memory stands in
         experiments/results/targets/presets.md.

Variants, two words with a comma between: ada_seq_balance (if none is named), ada_seq_pos,
ada_seq_balance_paper (weight 1/p), ada_est_ema, ada_est_ema_released, ada_est_value, grpo; and
released (no entropy bonus, if none is named) or paper (1e-4). Evaluation is the mean of 32 samples
at config.sampler.max_new, 2,048 tokens, where the paper's is at 4,096.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.ADA


def get_config(variant: str = "") -> Config:
    return presets.ada("Qwen2.5-Math-1.5B", variant, devices=1)
