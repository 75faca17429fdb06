"""SPEED-RL's settings for Qwen2.5-Math-1.5B (Zhang et al., arXiv 2506.09016, section 5).

Launch:  python experiments/train.py --config=configs/speed_qwen2p5_math_1p5b.py
             --workdir=runs/speed --config.model.path=DIRECTORY
         python experiments/train.py
             --config=configs/speed_qwen2p5_math_1p5b.py:speed_dapo,deepscaler ...
Expect:  not run at this scale yet; what it takes of four or eight H100 or v5p stands in
         experiments/results/targets/presets.md.

Evaluated on DAPO-1k, MATH500, AMC 2023, AIME 2024 and AIME 2025 (config.data.eval), each a curve of
its own; experiments/compare.py makes Table 1 of them. eval/dapo1k.jsonl, for runs on other data, is
made by
         python experiments/data.py dapo17k/dapo_math_17k.jsonl.gz --hold_out=1000
             --write=dapo17k/train.jsonl --write_held_out=eval/dapo1k.jsonl

Variants, up to three words with commas between: speed_rloo (the first is meant if none is named),
rloo, speed_dapo, dapo, forecast_rloo, forecast_dapo (ours); the training set, numina (integer
answers, no proofs), dapo17k (1,000 questions held out, as in the paper, and evaluated on) or
deepscaler; and paper, released or released_1p5b, which `presets.speed` compares. N_init is 4, as
released for 7B, and 8 in released_1p5b; the paper compares it with --config.rule.n_init=6 and 8.
SPEED screens 64 prompts a call whatever is needed, as the paper does;
--config.driver.screening=missing screens what is missing. Baselines are on-policy; DAPO refills by
calls of 16 prompts, and with --config.driver.screening=missing --config.driver.screen_prompts=64 by
one larger call.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.SPEED


def get_config(variant: str = "") -> Config:
    return presets.speed("Qwen2.5-Math-1.5B", variant, devices=1)
