"""The optimizer: global-norm clipping, then AdamW, with warm-up, and weight decay only on
matrices.
"""

import dataclasses
import functools
from typing import Any

import jax
import optax

SCHEDULES = ("constant", "linear", "cosine")
# Biases split by head are stored with two or more axes: rank alone would make them matrices.
_BIASES = frozenset({"bq", "bk", "bv"})
# Tokens that are not in a batch have no gradient; decay would only shrink rare ones.
_LOOKUPS = frozenset({"embed"})


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Settings of the optimizer.

    Attributes:
      learning_rate: peak, after warm-up.
      warmup_steps: updates of linear warm-up; update k (from 1) has k / warmup_steps of the peak.
      schedule: after warm-up: "constant", or "linear" or "cosine" down to `final_rate` of the peak
        at `total_steps`.
      final_rate: in [0, 1].
      total_steps: all updates, including warm-up; needed by "linear" and "cosine".
      weight_decay: decoupled, multiplied with the learning rate (AdamW).
      b1, b2, eps: Adam's.
      max_grad_norm: global norm that gradients are clipped to; 0 is off.
    """

    learning_rate: float = 1e-6
    warmup_steps: int = 10
    schedule: str = "constant"
    final_rate: float = 0.0
    total_steps: int = 0
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    max_grad_norm: float = 1.0

    def __post_init__(self):
        decays = self.schedule != "constant"
        for name, ok, want in (
            ("learning_rate", self.learning_rate >= 0, "0 or more"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("schedule", self.schedule in SCHEDULES, f"one of {SCHEDULES}"),
            ("final_rate", 0 <= self.final_rate <= 1, "in [0, 1]"),
            (
                "total_steps",
                not decays or self.total_steps > self.warmup_steps,
                f"more than warmup_steps ({self.warmup_steps}) with schedule {self.schedule!r}",
            ),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("b1", 0 <= self.b1 < 1, "in [0, 1)"),
            ("b2", 0 <= self.b2 < 1, "in [0, 1)"),
            ("eps", self.eps > 0, "above 0"),
            ("max_grad_norm", self.max_grad_norm >= 0, "0 (off) or more"),
        ):
            if not ok:
                got = getattr(self, name)
                raise ValueError(f"config.optimizer.{name} must be {want}, got {got!r}")


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Updates made so far (i32 scalar) -> learning rate of the next one (f32 scalar)."""
    left = config.total_steps - config.warmup_steps
    final = config.final_rate
    after = {
        "constant": lambda: optax.constant_schedule(config.learning_rate),
        "linear": lambda: optax.linear_schedule(
            config.learning_rate, final * config.learning_rate, left
        ),
        "cosine": lambda: optax.cosine_decay_schedule(config.learning_rate, left, final),
    }[config.schedule]()
    if not config.warmup_steps:
        return after
    # Starts at 1/warmup_steps: a rate of 0 would waste the first RL step.
    warmup = optax.linear_schedule(
        config.learning_rate / config.warmup_steps,
        config.learning_rate,
        max(config.warmup_steps - 1, 1),
    )
    return optax.join_schedules([warmup, after], [config.warmup_steps])


def decay_mask(params: Any) -> Any:
    """Pytree of bools like `params` (arrays or their abstract forms): which weights decay.

    Matrices decay: attention and MLP projections and the separate output head. Norm scales, biases
    and the embedding table do not. The rank is the weight's own, without the axis that stacks
    layers. Biases split by head count as biases.
    """

    def decays(path, leaf) -> bool:
        names = [str(getattr(key, "key", key)) for key in path]
        rank = leaf.ndim - ("layers" in names[:-1])
        return rank >= 2 and names[-1] not in _BIASES | _LOOKUPS

    return jax.tree_util.tree_map_with_path(decays, params)


def make_optimizer(config: OptimizerConfig, params: Any) -> optax.GradientTransformation:
    """The optax transformation for the tree of weights `params` (abstract is enough).

    Equal settings and trees give the same object, so that compiled functions are reused.
    """
    leaves, tree = jax.tree.flatten(decay_mask(params))
    if config.schedule == "constant":  # a constant schedule ignores total_steps
        config = dataclasses.replace(config, total_steps=0)
    return _make_optimizer(config, tuple(leaves), tree)


@functools.lru_cache(maxsize=16)
def _make_optimizer(config, decays, tree):
    adamw = optax.adamw(
        learning_rate_schedule(config),
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=jax.tree.unflatten(tree, decays),
    )
    clip = [optax.clip_by_global_norm(config.max_grad_norm)] if config.max_grad_norm else []
    return optax.chain(*clip, adamw)
