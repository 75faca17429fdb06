"""Configuration of a run: typed settings (`schema`), their checks, named methods, presets, and the
command line.
"""

from rl_speed.config.dotted import flatten
from rl_speed.config.schema import (
    EMBEDDED,
    Checkpoints,
    Config,
    Data,
    Driver,
    Environment,
    Estimate,
    Evaluation,
    Logging,
    MeshConfig,
    Model,
    Objective,
    Optimizer,
    Replay,
    Reward,
    Sampler,
    Training,
)

__all__ = [
    "EMBEDDED",
    "Checkpoints",
    "Config",
    "Data",
    "Driver",
    "Environment",
    "Estimate",
    "Evaluation",
    "Logging",
    "MeshConfig",
    "Model",
    "Objective",
    "Optimizer",
    "Replay",
    "Reward",
    "Sampler",
    "Training",
    "flatten",
]
