"""Configuration of a run: typed settings (`schema`), checks, named methods, presets, command
line.
"""

from rl_speed.config.schema import (
    EMBEDDED,
    RULES,
    Checkpoints,
    Config,
    Data,
    Driver,
    Estimate,
    Evaluation,
    Logging,
    MeshConfig,
    Model,
    Objective,
    Optimizer,
    Replay,
    Reward,
    RuleConfig,
    Sampler,
    Training,
    flatten,
)

__all__ = [
    "EMBEDDED",
    "RULES",
    "Checkpoints",
    "Config",
    "Data",
    "Driver",
    "Estimate",
    "Evaluation",
    "Logging",
    "MeshConfig",
    "Model",
    "Objective",
    "Optimizer",
    "Replay",
    "Reward",
    "RuleConfig",
    "Sampler",
    "Training",
    "flatten",
]
