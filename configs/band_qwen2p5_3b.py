"""Balanced online difficulty filtering, the settings for Qwen2.5-3B (Bae et al., arXiv 2504.03380).

Launch:  python experiments/train.py --config=configs/band_qwen2p5_3b.py --workdir=runs/band
             --config.model.path=DIRECTORY
         python experiments/train.py --config=configs/band_qwen2p5_3b.py:30-70 ...
Expect:  not run at this scale yet; what it takes of four or eight H100 or v5p stands in
         experiments/results/targets/presets.md.

Variants, one word, of the rows of the paper's Table 1: a balanced band of pass rates in percent
with neither end inside, 20-80 (if none is named), 0-100, 10-90, 30-70, 40-60; a skewed one that
filters by one end, over-0, over-20, over-40 (0.4 < p <= 1), under-100, under-80, under-60 (0 <= p <
0.6); plain (GRPO, nothing filtered); curation (filtered once by a proxy's pass rates), schedule
(also easy to hard): these two need --config.data.pass_rates=FILE, from experiments/pass_rates.py
--split=train. Section 4.4 of the paper has both ends inside: --config.rule.inclusive=both. Training
questions are NuminaMath's, of which 1,024 are held out and evaluated on; evaluation is bound to
config.sampler.max_new, 4,096 tokens here, where the paper's is 8,192. The SFT cold start (1.1k
solutions) is configs/sft.py:band.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.BAND


def get_config(variant: str = "") -> Config:
    return presets.band("Qwen2.5-3B", variant, devices=4)
