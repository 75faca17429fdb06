"""What a run is made of: typed settings (`schema`), what they must satisfy (`checks`), named methods, presets, the command line."""

from rl_speed.config.schema import (EMBEDDED, RULES, Checkpoints, Config, Data, Driver, Estimate, Evaluation, Logging, MeshConfig,
                                    Model, Objective, Optimizer, Replay, Reward, RuleConfig, Sampler,
                                    Training, flatten)

__all__ = ["EMBEDDED", "RULES", "Checkpoints", "Config", "Data", "Driver", "Estimate", "Evaluation", "Logging", "MeshConfig", "Model",
           "Objective", "Optimizer", "Replay", "Reward", "RuleConfig", "Sampler", "Training",
           "flatten"]
