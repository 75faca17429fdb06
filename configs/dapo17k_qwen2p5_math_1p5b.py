"""SPEED-RLOO on DAPO-Math-17k with Qwen2.5-Math-1.5B: the SPEED paper's experiment to start from
(arXiv 2506.09016, section 5).

Launch:  python experiments/train.py --config=configs/dapo17k_qwen2p5_math_1p5b.py
             --workdir=runs/dapo17k --config.model.path=DIRECTORY --config.data.train=FILE
         The directory is the model's, downloaded from the hub; the file is DAPO-Math-17k as
         .parquet or .jsonl, in any form that is published, or the name of a data set of the hub:
         open-r1/DAPO-Math-17k-Processed:en.
Expect:  not run at this scale yet; the whole of it runs on a shrunken random model
         (tests/training/test_training_real_models.py). Settings are those of
         speed_qwen2p5_math_1p5b.py:dapo17k; what it takes of four or eight H100 or v5p stands
         in experiments/results/targets/presets.md.
After:   python experiments/evaluate.py --checkpoint=runs/dapo17k
             --config=configs/evaluation.py:speed
             --data=eval/math500.jsonl,eval/amc23.jsonl,eval/aime24.jsonl

1,000 questions, those of lowest hash, never train and are evaluated on; of questions that stand
there twice, one trains. 512 of the 1,000 are looked at while training; --config.data.eval_prompts=0
takes all. Variants: speed_rloo (if none is named), rloo, speed_dapo, dapo, forecast_rloo,
forecast_dapo (ours); paper (if none is named), released or released_1p5b (SPEED's script of this
model and these data), as in --config=configs/dapo17k_qwen2p5_math_1p5b.py:speed_dapo,released.
"""

from rl_speed.config import Config, presets

VARIANTS = (presets.SPEED[0], presets.SPEED[2])


def get_config(variant: str = "") -> Config:
    config = presets.speed(
        "Qwen2.5-Math-1.5B", ",".join(filter(None, (variant, "dapo17k"))), devices=1
    )
    # To start with, no other file is needed; the paper's sets are those of speed_qwen2p5_math_1p5b.
    config.data.eval, config.data.eval_prompts = "", 512
    return config
