"""Balanced online difficulty filtering, the settings for Qwen2.5-3B (Bae et al., arXiv 2504.03380).

Launch:  python experiments/train.py --config=configs/band_qwen2p5_3b.py --workdir=runs/band
             --config.model.path=DIRECTORY
         python experiments/train.py --config=configs/band_qwen2p5_3b.py:30-70 ...
Expect:  not run at this scale yet; what it takes of an H100's or a TPU's memory stands in
         experiments/results/targets/presets.md.

Variants, one word: a band of pass rates in percent, 20-80 (if none is named), 0-100, 10-90, 30-70,
40-60, or skewed 20-100, 40-100, 0-80, 0-60; plain (GRPO, nothing filtered); curation (filtered once
by a proxy's pass rates), schedule (also easy to hard): these two need
--config.data.pass_rates=FILE, from experiments/pass_rates.py --split=train. Bands count their ends,
as in the paper's algorithm; its table does not: --config.rule.inclusive=false. Evaluation is bound
to config.sampler.max_new, 4,096 tokens here, where the paper's is 8,192; its SFT cold start (1.1k
solutions) is not part of this.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.BAND


def get_config(variant: str = "") -> Config:
    return presets.band("Qwen2.5-3B", variant, devices=4)
