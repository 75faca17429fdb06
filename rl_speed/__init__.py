"""rl_speed: reinforcement learning with verifiable rewards and selective sampling, in JAX."""

__version__ = "0.2.0"
