"""The named methods: which rule and which objective each is.

A config picks one; `compare` runs several from one start.
"""

from rl_speed.config import Config

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

_UNIFORM, _DYNAMIC, _SPEED = (
    {"rule.name": "uniform"},
    {"rule.name": "dynamic"},
    {"rule.name": "speed"},
)
# One of the balanced bands of Bae et al.; rule.low, rule.high and rule.inclusive make the others.
_BAND = {"rule.name": "band", "rule.low": 0.2, "rule.high": 0.8}

# Reinforce-Ada: pools of up to 4 rounds of 8 samples, of which 4 are trained on; a batch is decided
# before the next begins.
_ADA = {**_DAPO, "objective.advantage": "pool", "driver.prefetch": False}
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
# Budgets of 8 samples on average; gamma 1/2 with the weight 1/sqrt(p) for the rest is the
# paper's hybrid.
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

# RPO: rollouts start inside a cached response. L = the group's shortest response fits any scale,
# and lets a rollout undo whatever went wrong; 300, 500 and 800 tokens are the paper's fixed ones.
_RPO = {"replay.window": "min", "replay.eps": 0.1, "replay.start": "sample"}
_RPO_RELEASED = {**_RPO, "replay.eps": 0.5, "replay.mask_prefix": False, "replay.max_new": -1}

METHODS: dict[str, dict[str, object]] = {
    "rloo": _UNIFORM | _RLOO,
    "grpo": _UNIFORM | _GRPO,
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
    "speed_reinforce": _SPEED | _REINFORCE,
    "ada_seq_pos": _POS,
    "ada_seq_balance": _BALANCE,
    "ada_seq_balance_paper": {
        **_BALANCE,
        "objective.weight": "inv_p",
        "objective.entropy_coef": 1e-4,
    },
    "ada_est_ema": {**_ESTIMATED, "estimate.kind": "ema"},
    "ada_est_ema_released": {
        **_ESTIMATED,
        "estimate.kind": "ema",
        "estimate.gamma": 1.0,
        "objective.weight": "none",
        "objective.weight_from": "pool",
        "objective.singleton": "zero",
    },
    "rpo_grpo": _UNIFORM | _GRPO | _RPO,
    "rpo_grpo_released": _UNIFORM | _GRPO | _RPO_RELEASED,
    "rpo_dapo": _DYNAMIC | _DAPO | _RPO,
    "rpo_speed_rloo": _SPEED | _RLOO | _RPO,
    "ada_est_value": {**_ESTIMATED, "estimate.kind": "value"},
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
    driver = config.driver
    if config.rule.n != samples:
        driver.groups = max(1, driver.groups * samples // config.rule.n)
        driver.buffer_groups = max(driver.buffer_groups, driver.groups)
        driver.screen_prompts = max(driver.screen_prompts, driver.groups)
    config.method = name
    return config
