"""The named methods: which rule and which objective each is. A config picks one; `compare` runs several from one start."""

from rl_speed.config import Config

_RLOO = {"objective.advantage": "rloo", "objective.loss": "pg", "objective.aggregation": "token_mean"}
_GRPO = {"objective.advantage": "grpo", "objective.loss": "ppo", "objective.aggregation": "seq_mean_token_mean",
         "objective.clip_low": 0.2, "objective.clip_high": 0.2}
_DAPO = {"objective.advantage": "grpo", "objective.loss": "ppo", "objective.aggregation": "token_mean",
         "objective.clip_low": 0.2, "objective.clip_high": 0.28}
_REINFORCE = {**_RLOO, "objective.advantage": "reinforce"}
_REINFORCE_PP = {**_GRPO, "objective.advantage": "reinforce_pp", "objective.aggregation": "token_mean"}
_DR_GRPO = {**_GRPO, "objective.advantage": "dr_grpo", "objective.aggregation": "token_sum_constant"}

_UNIFORM, _DYNAMIC, _SPEED = {"rule.name": "uniform"}, {"rule.name": "dynamic"}, {"rule.name": "speed"}
# One of the balanced bands of Bae et al.; rule.low, rule.high and rule.inclusive make the others.
_BAND = {"rule.name": "band", "rule.low": 0.2, "rule.high": 0.8}

METHODS: dict[str, dict[str, object]] = {
    "rloo": _UNIFORM | _RLOO,
    "grpo": _UNIFORM | _GRPO,
    "dr_grpo": _UNIFORM | _DR_GRPO,
    "reinforce": _UNIFORM | _REINFORCE,
    "reinforce_pp": _UNIFORM | _REINFORCE_PP,
    "dapo": _DYNAMIC | _DAPO,
    "band_grpo": _BAND | _GRPO,
    "speed_rloo": _SPEED | _RLOO,
    "speed_grpo": _SPEED | _GRPO,
    "speed_dapo": _SPEED | _DAPO,
    "speed_reinforce": _SPEED | _REINFORCE,
}


def apply(config: Config, name: str) -> Config:
    """Set the fields of `config` that make it the named method; everything else stays. Returns `config`."""
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    for path, value in METHODS[name].items():
        section, leaf = path.split(".")
        setattr(getattr(config, section), leaf, value)
    config.method = name
    return config
