"""The embedded tasks with an environment that replies between the turns of the policy
(rl_speed/environments/).

again       chain: a wrong answer is followed by the question, once, and the policy answers again.
            The reward reads the last answer.
calculator  scratchpad: "a3+4=" is followed by its result, which the policy then need not know.

Variants: those of configs/embedded.py after the word, but for RPO's and Reinforce-Ada-Est's, as in
"again,rloo".

Launch:  python experiments/train.py --config=configs/environments.py:again --workdir=runs/again
         python experiments/train.py --config=configs/environments.py:calculator,rloo
             --workdir=runs/calculator
Expect:  train/turns, the mean number of replies in a trained response; accuracies in
         experiments/results/environments/README.md.
"""

from rl_speed.config import Config, presets

VARIANTS = presets.WITH_ENVIRONMENT


def get_config(variant: str = "") -> Config:
    return presets.with_environment(variant)
