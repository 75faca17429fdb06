"""Supervised fine-tuning, the cold start before RL: settings of experiments/sft.py, every one in rl_speed/sft/config.py.

Launch:  python experiments/sft.py --config=configs/sft.py --out=runs/sft                    (a new embedded policy)
         python experiments/sft.py --config=configs/sft.py:files --out=runs/sft --config.model.path=MODEL
             --config.data.train=gsm8k/train.jsonl --config.data.eval=gsm8k/test.jsonl
Expect:  the table's last column.

NAME      what it is                                                                      what comes of it
--------  ------------------------------------------------------------------------------  ------------------------------------------
embedded  a new policy of 0.1 M parameters on demonstrations of the embedded task: 2600   rl_speed/assets/embedded, of a held-out
          updates of 128 at a rate of 3e-3; what it is without a name                     loss of 0.755, in 3 minutes on two cores
files     MODEL on rows of one's own, as a chat: 3 epochs in batches of 128 at a rate of  not measured: no weights could be had
          1e-5; needs config.model.path and config.data.train
band      the cold start of Bae et al. (arXiv 2504.03380), 1,100 distilled solutions:     not measured
          5 epochs in batches of 21 at a rate of 5e-6; needs config.data.train
"""

from rl_speed.config import presets
from rl_speed.sft.config import SFTConfig

VARIANTS = (("embedded", "files", "band"),)


def get_config(variant: str = "") -> SFTConfig:
    name, = presets.choose(variant, VARIANTS)
    config = SFTConfig()
    if name != "embedded":
        config.model.path, config.data.train = "MODEL", "rows.jsonl"
    if name == "band":
        config.model.path, config.data.train = "Qwen2.5-3B", "distilled.jsonl"
        config.optimizer.learning_rate = 5e-6
        config.optimizer.warmup_steps = 25
        config.examples.epochs = 5
        config.examples.batch = 21
        # Ours: the paper names neither schedule, clipping, decay nor length.
        config.optimizer.schedule = "cosine"
        config.optimizer.max_grad_norm = 1.0
        config.optimizer.weight_decay = 0.01
        config.examples.max_length = 8192
    return config
