"""The named methods: which rule and which objective each is.

A config picks one; `compare` runs several from one start. A name without an ending is our default;
`_paper` and `_released` are that method as its paper, or its authors' code, has it. `BASELINES`
says what to compare a method with.

Proximal policy optimisation with a critic, which the SPEED paper names among its base algorithms,
is not here: only its clipped loss is (`objective.loss="ppo"`), with advantages from groups.
"""

import copy
from collections.abc import Callable, Sequence

from rl_speed.config import Config

# A method's name -> its settings: a configuration of its own.
OfMethod = Callable[[str], Config]

_RLOO = {
    "objective.advantage": "rloo",
    "objective.loss": "pg",
    "objective.aggregation": "token_mean",
}
_GRPO = {
    "objective.advantage": "grpo",
    "objective.loss": "ppo",
    "objective.aggregation": "seq_mean_token_mean",
    "objective.clip_low": 0.2,
    "objective.clip_high": 0.2,
}
# The loss of DAPO, and of GRPO where verl's defaults make it, as Reinforce-Ada's baseline.
_DAPO = {
    "objective.advantage": "grpo",
    "objective.loss": "ppo",
    "objective.aggregation": "token_mean",
    "objective.clip_low": 0.2,
    "objective.clip_high": 0.28,
}
_REINFORCE = {**_RLOO, "objective.advantage": "reinforce"}
_REINFORCE_PP = {
    **_GRPO,
    "objective.advantage": "reinforce_pp",
    "objective.aggregation": "token_mean",
}
# Samples clipped whole, with the paper's bounds, which are of another size than those of tokens.
_GSPO = {**_GRPO, "objective.loss": "gspo", "objective.clip_low": 3e-4, "objective.clip_high": 4e-4}
# Weights bounded from above alone, over all tokens of the batch; the bound is ours, the
# paper says none.
_CISPO = {**_DAPO, "objective.loss": "cispo", "objective.clip_low": 1.0, "objective.clip_high": 2.0}
_DR_GRPO = {
    **_GRPO,
    "objective.advantage": "dr_grpo",
    "objective.aggregation": "token_sum_constant",
}

_UNIFORM = {"rule.name": "uniform"}
_DYNAMIC = {"rule.name": "dynamic"}
_SPEED = {"rule.name": "speed"}
# A balanced band of Bae et al., ends inside; rule.low, rule.high, rule.inclusive make the others.
_BAND = {"rule.name": "band", "rule.low": 0.2, "rule.high": 0.8, "rule.inclusive": "both"}

# Reinforce-Ada: the advantage is r - the mean of all samples of the prompt (Algorithms 1 and 2),
# over no standard deviation; so it is released, too (norm_adv_by_std_in_grpo=False).
_ADA_LOSS = {**_DAPO, "objective.advantage": "pool"}
# A batch is decided before the next begins. Pools of up to 4 rounds of 8 samples, of which 4 are
# trained on.
_ADA = {**_ADA_LOSS, "driver.prefetch": False}
_SEQUENTIAL = {
    **_ADA,
    "rule.name": "sequential",
    "rule.n": 4,
    "rule.m": 8,
    "rule.rounds": 4,
    "rule.on_unresolved": "keep",
}
_POS = {**_SEQUENTIAL, "rule.k_pos": 1, "rule.k_neg": 0}
_BALANCE = {**_SEQUENTIAL, "rule.k_pos": 2, "rule.k_neg": 2}
# Section 3.2 multiplies the gradient by 1/p_hat; Algorithm 2 and the released code do not.
_SEQ_PAPER = {"objective.weight": "inv_p"}
# Section 3.3 says that DAPO's refilling can be combined with it, not how. Ours: a prompt is sampled
# until one answer is right and one wrong, and replaced if it never is.
_SEQ_DAPO = {**_BALANCE, "rule.k_pos": 1, "rule.k_neg": 1, "rule.on_unresolved": "drop"}
# Budgets of 8 samples on average, in proportion to 1/sqrt(p_hat), and the weight 1/sqrt(p) for the
# rest: the hybrid of section 3.1. Ours: at most 32 samples a prompt, where the paper leaves N_max
# open; the weight is of the estimate from before the visit, which knows nothing of the rewards that
# it multiplies; a single sample is measured against that estimate.
_ESTIMATED = {
    **_ADA,
    "rule.name": "allocated",
    "rule.n": 8,
    "rule.n_min": 1,
    "rule.n_max": 32,
    "estimate.gamma": 0.5,
    "objective.weight": "inv_sqrt_p",
    "objective.weight_from": "estimate",
    "objective.singleton": "estimate",
}
# Algorithm 1, lines 14 to 16: weight and baseline are of the samples just collected. That weight is
# correlated with the advantage that it multiplies: of N samples it is sqrt(N) at most, and of 8
# samples at p = 0.1 makes 2.1 on average (theory.sequential_weight), where 1/sqrt(p) makes 2.8.
_EST_PAPER = {**_ESTIMATED, "objective.weight_from": "pool", "objective.singleton": "zero"}
# Released: budgets in proportion to 1/p_hat, no weight. There they are 1 + a share of the rest,
# without bound; here rule.n_max bounds them.
_EST_RELEASED = {**_EST_PAPER, "estimate.gamma": 1.0, "objective.weight": "none"}

# RPO: rollouts start inside a cached response. L = the group's shortest response fits any scale,
# and lets a rollout undo whatever went wrong; half of it, and 300, 500 and 800 tokens are the
# paper's. Replayed tokens are not trained on, which is ours: they were sampled by another policy.
_RPO = {"replay.window": "min", "replay.eps": 0.1, "replay.start": "sample"}
# Equations 3 and 5: o is prefix and suffix, and the loss goes over all of it.
_RPO_PAPER = {**_RPO, "replay.mask_prefix": False}
_RPO_RELEASED = {**_RPO_PAPER, "replay.eps": 0.5, "replay.max_new": -1}

# Ours. Prompts in the order of what a sample of them is worth, by a forecast of pass rates that is
# learnt while training; each screened with as many samples as its forecast leaves in doubt, which
# is none for some. Nobody waits screened for the next step.
_FORECAST = {
    "rule.name": "adaptive_speed",
    "data.order": "forecast",
    "data.worth_power": 0.0,
    "driver.prefetch": False,
}

METHODS: dict[str, dict[str, object]] = {
    "rloo": _UNIFORM | _RLOO,
    "grpo": _UNIFORM | _GRPO,
    "grpo_dapo_loss": _UNIFORM | _DAPO,
    "grpo_ada_loss": _UNIFORM | _ADA_LOSS,
    "dr_grpo": _UNIFORM | _DR_GRPO,
    "gspo": _UNIFORM | _GSPO,
    "cispo": _UNIFORM | _CISPO,
    "reinforce": _UNIFORM | _REINFORCE,
    "reinforce_pp": _UNIFORM | _REINFORCE_PP,
    "dapo": _DYNAMIC | _DAPO,
    "band_grpo": _BAND | _GRPO,
    "speed_rloo": _SPEED | _RLOO,
    "speed_grpo": _SPEED | _GRPO,
    "speed_dapo": _SPEED | _DAPO,
    "speed_dr_grpo": _SPEED | _DR_GRPO,
    "speed_reinforce": _SPEED | _REINFORCE,
    "speed_reinforce_pp": _SPEED | _REINFORCE_PP,
    "ada_seq_pos": _POS,
    "ada_seq_pos_paper": _POS | _SEQ_PAPER,
    "ada_seq_balance": _BALANCE,
    "ada_seq_balance_paper": _BALANCE | _SEQ_PAPER,
    "ada_seq_dapo": _SEQ_DAPO,
    "ada_est_ema": _ESTIMATED | {"estimate.kind": "ema"},
    "ada_est_ema_paper": _EST_PAPER | {"estimate.kind": "ema"},
    "ada_est_ema_released": _EST_RELEASED | {"estimate.kind": "ema"},
    "ada_est_value": _ESTIMATED | {"estimate.kind": "value"},
    "ada_est_value_paper": _EST_PAPER | {"estimate.kind": "value"},
    "rpo_grpo": _UNIFORM | _GRPO | _RPO,
    "rpo_grpo_paper": _UNIFORM | _GRPO | _RPO_PAPER,
    "rpo_grpo_released": _UNIFORM | _GRPO | _RPO_RELEASED,
    "rpo_dapo": _DYNAMIC | _DAPO | _RPO,
    "rpo_dapo_paper": _DYNAMIC | _DAPO | _RPO_PAPER,
    "rpo_speed_rloo": _SPEED | _RLOO | _RPO,
    "forecast_rloo": _FORECAST | _RLOO,
    "forecast_dapo": _FORECAST | _DAPO,
}

# The method with the same loss that samples plainly: what a claim about sampling is to be held
# against. What else of the objective a method changes (weights of prompts, training on prefixes) is
# a part of the method; README.md has the table.
BASELINES: dict[str, str] = {
    "speed_rloo": "rloo",
    **{name: "grpo" for name in ("speed_grpo", "band_grpo")},
    **{name: "grpo" for name in METHODS if name.startswith("rpo_grpo")},
    **{name: "grpo_dapo_loss" for name in ("dapo", "speed_dapo")},
    **{name: "dapo" for name in METHODS if name.startswith("rpo_dapo")},
    **{name: "grpo_ada_loss" for name in METHODS if name.startswith("ada_")},
    "speed_dr_grpo": "dr_grpo",
    "speed_reinforce": "reinforce",
    "speed_reinforce_pp": "reinforce_pp",
    "rpo_speed_rloo": "speed_rloo",
    "forecast_rloo": "rloo",
    "forecast_dapo": "grpo_dapo_loss",
}


def apply(config: Config, name: str) -> Config:
    """Set the fields of `config` that make it the named method; everything else stays.

    Returns `config`.

    A method with its own number of samples a group (`rule.n`) gets as many more groups a batch, so
    that methods train on batches of one size; buffer and screening are raised to hold them.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    samples = config.rule.n
    for path, value in METHODS[name].items():
        config.set(path, value)
    if config.rule.n != samples:
        keep_batch(config, config.driver.groups * samples)
    config.method = name
    return config


def keep_batch(config: Config, samples: int) -> None:
    """As many groups of `config.rule.n` as make a batch of so many samples; buffer and screening
    hold them.
    """
    driver = config.driver
    driver.groups = max(1, samples // config.rule.n)
    driver.buffer_groups = max(driver.buffer_groups, driver.groups)
    driver.screen_prompts = max(driver.screen_prompts, driver.groups)


def of(config: Config) -> OfMethod:
    """`config` with the fields of each method set."""
    return lambda name: apply(copy.deepcopy(config), name)


def nearest(name: str, known: Sequence[str]) -> str | None:
    """Of the methods in `known` the one whose sampling is like that of the method `name`, itself
    first; else one that samples plainly; else None.
    """

    def way(fields):
        return tuple(
            fields.get(field, otherwise)
            for field, otherwise in (
                ("rule.name", ""),
                ("replay.window", "none"),
                ("data.order", ""),
                ("estimate.kind", "none"),
            )
        )

    for wanted in (METHODS[name], _UNIFORM):
        alike = [other for other in known if way(METHODS[other]) == way(wanted)]
        if alike:
            return name if name in alike else alike[0]
    return None
