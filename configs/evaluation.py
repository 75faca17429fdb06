"""How experiments/evaluate.py asks and judges: the embedded tasks' way, any model's, and as
suits each paper.

Launch:  python experiments/evaluate.py --config=configs/evaluation.py:NAME \\
             --config.model.path=MODEL --data=math500.jsonl
         python experiments/evaluate.py --config=configs/evaluation.py:NAME --checkpoint=WORKDIR
Expect:  a table of average@32 and pass@k. The embedded tasks take half a minute on two CPU cores.
         The others have not been run with real weights.

NAME          for                                    temperature  top-p  tokens  prompt         verifier
------------  -------------------------------------  -----------  -----  ------  -------------  ----------
embedded      the chain task's policy                     1        1         16  {question}=    exact
scratchpad    the scratchpad task's policy                1        1         80  {question}=    scratchpad
chat          any model, without --config                 1        1      4,096  chat           math
speed         Zhang et al. (arXiv 2506.09016)             1        1      3,072  qwen_math_cot  math
band          Bae et al. (arXiv 2504.03380)               0.6      0.95   8,192  r1_zero_boxed  math
ada           Xiong et al., Reinforce-Ada                 1        1      4,096  reinforce_ada  math
rpo           Yi et al., RPO                              0.6      0.95  32,768  open_rs        math
rpo_released  as that, with the limit of its run          0.6      0.95   2,048  open_rs        math

Temperature, top-p and tokens of `band` (appendix D) and `ada` (section 4.1) are the papers'. Zhang
et al. say none: those of `speed` are of their released training, which evaluates AIME 16 times and
AMC 4 times. Yi et al. say lighteval and no more (0.7 and 4,096 are of their training). Their
released eval_model.sh sets those of `rpo` in a variable that it never uses, and runs with a
max_model_length of 2,048, which in vLLM holds prompt and response. `rpo_released` gives that to the
response, with temperature and top-p of the variable. Xiong et al. draw 32 samples; for the others
that number is ours. Prompts are those of our training presets, and
rl_speed/policy/prompt_formats.py says whose they are. With --checkpoint=WORKDIR the machine's share
is the run's (MACHINE in rl_speed/evaluation/settings.py).
"""  # noqa: E501

from rl_speed.config import Config, presets

VARIANTS = presets.EVALUATION


def get_config(variant: str = "") -> Config:
    return presets.evaluation(variant)
