"""The embedded task, the settings that every method shares. Methods differ in rule and objective alone.

Launch:  python experiments/compare.py --config=configs/embedded.py --methods=speed_rloo,rloo --workdir=runs/compare
         python experiments/train.py --config=configs/embedded.py:grpo --workdir=runs/grpo      (as embedded_grpo.py: any method)
Expect:  see README.md, "Results".
"""

from rl_speed.presets import embedded

get_config = embedded
