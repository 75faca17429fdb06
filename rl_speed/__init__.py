"""rl_speed: reinforcement learning with verifiable rewards that spends samples where they teach."""

__version__ = "0.2.0"
