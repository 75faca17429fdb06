"""SPEED-RL's settings for Qwen2.5-Math-1.5B (Zhang et al., arXiv 2506.09016, section 5).

Launch:  python experiments/train.py --config=configs/speed_qwen2p5_math_1p5b.py
             --workdir=runs/speed --config.model.path=DIRECTORY
         python experiments/train.py
             --config=configs/speed_qwen2p5_math_1p5b.py:speed_dapo,deepscaler ...
Expect:  not run at this scale yet; what it takes of an H100's or a TPU's memory stands in
         experiments/results/targets/presets.md.

Evaluated on DAPO-1k, MATH500, AMC 2023 and AIME 2024 (config.data.eval), each a curve of its own;
experiments/compare.py makes Table 1 of them. eval/dapo1k.jsonl, for runs on other data, is made by
         python experiments/data.py dapo17k/dapo_math_17k.jsonl.gz --hold_out=1000
             --write=dapo17k/train.jsonl --write_held_out=eval/dapo1k.jsonl

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
