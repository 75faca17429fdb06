"""Training objectives: advantages, losses, KL estimators and reward shaping.

Pure, jittable functions on flat arrays (`[R]` samples, `[R, T]` tokens) with group ids. Imports
only JAX and NumPy.
"""

from rl_speed.objectives.advantages import (
    ADVANTAGES,
    AdvantageFn,
    GroupStatistics,
    check_advantage,
    dr_grpo,
    group_statistics,
    grpo,
    ngrpo,
    reinforce,
    reinforce_pp,
    rloo,
)
from rl_speed.objectives.batch_loss import (
    AGGREGATIONS,
    CORRECTIONS,
    merge_metrics,
    policy_loss,
    reduce_metrics,
    summarise_metrics,
    token_weights,
)
from rl_speed.objectives.divergences import KL_KINDS, kl
from rl_speed.objectives.losses import (
    LOSSES,
    Cispo,
    Gspo,
    LossFn,
    Pg,
    Ppo,
    Tis,
    Tokens,
    check_loss,
    clip_where_ppo_does,
)
from rl_speed.objectives.pool import (
    POOL_ADVANTAGES,
    PoolStatistics,
    balanced_downsample,
    kept_rows,
    pool_advantages,
    pool_statistics,
    prompt_weights,
    resolved,
)
from rl_speed.objectives.shaping import kl_shaped_rewards, overlong_penalty

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "AdvantageFn",
    "CORRECTIONS",
    "Cispo",
    "GroupStatistics",
    "Gspo",
    "KL_KINDS",
    "LOSSES",
    "LossFn",
    "POOL_ADVANTAGES",
    "Pg",
    "PoolStatistics",
    "Ppo",
    "Tis",
    "Tokens",
    "balanced_downsample",
    "check_advantage",
    "check_loss",
    "clip_where_ppo_does",
    "dr_grpo",
    "group_statistics",
    "grpo",
    "kept_rows",
    "kl",
    "kl_shaped_rewards",
    "merge_metrics",
    "ngrpo",
    "reduce_metrics",
    "overlong_penalty",
    "policy_loss",
    "pool_advantages",
    "pool_statistics",
    "prompt_weights",
    "reinforce",
    "reinforce_pp",
    "resolved",
    "rloo",
    "summarise_metrics",
    "token_weights",
]
