"""RPO's settings for DeepSeek-R1-Distill-Qwen-1.5B (Yi et al.).

Launch:  python experiments/train.py --config=configs/rpo_deepseek_r1_distill_qwen_1p5b.py
             --workdir=runs/rpo --config.model.path=DIRECTORY
         python experiments/train.py
             --config=configs/rpo_deepseek_r1_distill_qwen_1p5b.py:rpo_dapo,500,plain ...
Expect:  not run at this scale yet; what it takes of four or eight H100 or v5p stands in
         experiments/results/targets/presets.md, without the KL's reference policy.

Variants, up to four words with commas between. The method: rpo_grpo_paper (if none is named) and
rpo_dapo_paper, which train on the replayed prefix too, rpo_grpo and rpo_dapo, which do not (ours),
rpo_grpo_released, grpo, dapo. How far back a rollout may start: half_min, as in the paper's section
4.2 (if none is named; rpo_grpo_released: 299 tokens), min, or 300, 500, 800 tokens. length_aware,
the paper's shaped reward, or plain; if neither is named, RPO has the former, as the paper
recommends, and rpo_grpo_released, grpo and dapo the latter. any (if none is named) or only_correct,
which keeps wrong responses from replacing right ones. Training questions are the 7,000 of open-rs.
`presets.rpo` says what is the paper's, what is released, and what is ours.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.RPO


def get_config(variant: str = "") -> Config:
    return presets.rpo("DeepSeek-R1-Distill-Qwen-1.5B", variant, devices=2)
