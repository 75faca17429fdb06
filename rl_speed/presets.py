"""Settings that several files in configs/ start from."""

from rl_speed.config import Config


def embedded() -> Config:
    """The embedded task on two CPU cores: what every method there shares. Methods differ in rule and objective alone."""
    config = Config()
    config.data.max_prompt_length = 14
    config.sampler.max_new = 13
    config.sampler.slots = 128
    config.optimizer.learning_rate = 2e-4
    config.optimizer.warmup_steps = 10
    return config
