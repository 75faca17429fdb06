"""Reinforce-Ada's settings for Qwen3-4B-Instruct-2507 (Xiong et al.: "Qwen3-4B-Instruct"; the date
is that of their release).

Launch:  python experiments/train.py --config=configs/ada_qwen3_4b.py --workdir=runs/ada
             --config.model.path=DIRECTORY
         python experiments/train.py --config=configs/ada_qwen3_4b.py:ada_seq_pos,released ...
Expect:  not run at this scale yet; what it takes of four or eight H100 or v5p stands in
         experiments/results/targets/presets.md.

Variants: those of ada_qwen2p5_math_1p5b.py, but that hard is meant if neither hard nor moderate is
named: the released checkpoint of this model is of hard prompts, by the pass rates of
Qwen2.5-Math-7B (their README). Section 4.1 of the paper describes moderate, for all models.
Measure the rates with the 7B to repeat the release; ada_qwen2p5_math_1p5b.py says how.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.ADA_HARD


def get_config(variant: str = "") -> Config:
    return presets.ada("Qwen3-4B-Instruct-2507", variant, devices=4, words=VARIANTS)
