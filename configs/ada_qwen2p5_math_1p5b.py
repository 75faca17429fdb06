"""Reinforce-Ada's settings for Qwen2.5-Math-1.5B (Xiong et al.).

Launch:  python experiments/pass_rates.py --config=configs/ada_qwen2p5_math_1p5b.py
             --split=train --samples=16 --out=runs/rates --config.model.path=DIRECTORY
         python experiments/train.py --config=configs/ada_qwen2p5_math_1p5b.py --workdir=runs/ada
             --config.model.path=DIRECTORY --config.data.pass_rates=runs/rates/pass_rates.json
         python experiments/train.py
             --config=configs/ada_qwen2p5_math_1p5b.py:ada_seq_pos,released,hard ...
Expect:  not run at this scale yet; what it takes of four or eight H100 or v5p stands in
         experiments/results/targets/presets.md.

Variants, up to three words with commas between. The method: ada_seq_balance (if none is named) and
ada_seq_pos (Algorithm 2), ada_seq_balance_paper and ada_seq_pos_paper (section 3.2, weight 1/p),
ada_seq_dapo (section 3.3), ada_est_ema_paper and ada_est_value_paper (Algorithm 1), ada_est_ema and
ada_est_value (our weight, of the estimate from before the visit), ada_est_ema_released; baselines
grpo_dapo_loss (the paper's GRPO; --config.rule.n=8 or 16 for its others), grpo_ada_loss (differs
from the ada_* in sampling alone) and dapo. Whose numbers: paper (if none is named) or released.
Which questions of OpenR1-Math-220k, by the pass rates that the first command measures: moderate (if
none is named) or hard. `presets.ada` has the numbers of each. Evaluation is the mean of 32 samples
at config.sampler.max_new, 2,048 tokens, where the paper's is at 4,096.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.ADA


def get_config(variant: str = "") -> Config:
    return presets.ada("Qwen2.5-Math-1.5B", variant, devices=1)
