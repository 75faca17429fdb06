"""SPEED-RL's settings for Qwen2.5-Math-1.5B (Zhang et al., arXiv 2506.09016, section 5).

Launch:  python experiments/train.py --config=configs/speed_qwen2p5_math_1p5b.py
             --workdir=runs/speed --config.model.path=DIRECTORY
         python experiments/train.py
             --config=configs/speed_qwen2p5_math_1p5b.py:speed_dapo,deepscaler ...
Expect:  not run at this scale yet; what it takes of an H100's or a TPU's memory stands in
         experiments/results/targets/presets.md.

Variants, two words with a comma between: speed_rloo (the first is meant if none is named), rloo,
speed_dapo, dapo; and the training set, numina (integer answers, no proofs), dapo17k (1,000
questions held out, as in the paper, and evaluated on) or deepscaler. The paper's other N_init:
--config.rule.n_init=4 and 6. It screens 64 prompts a call whatever is needed;
--config.driver.screening=missing screens what is missing.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.SPEED


def get_config(variant: str = "") -> Config:
    return presets.speed("Qwen2.5-Math-1.5B", variant, devices=1)
