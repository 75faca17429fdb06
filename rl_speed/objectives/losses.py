"""Losses per token. Each is a function of its tokens; a frozen dataclass where it has numbers:

    @dataclasses.dataclass(frozen=True)
    class Tis:
        truncation: float = 2.0

        def __call__(self, tokens: Tokens):
            weight = jax.lax.stop_gradient(jnp.minimum(tokens.ratio, self.truncation))
            return -tokens.advantages * weight * tokens.logprobs, {}

`policy_loss` (batch_loss.py) does the rest: masks, weights, stale samples, KL, entropy, metrics.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Metrics of `policy_loss` itself: no loss may log them.
OWN_SUMS = frozenset(
    "tokens sequences ratio correction kl_behaviour behaviour_gap behaviour_gap_exp kl_ref "
    "entropy".split()
)


class Tokens(NamedTuple):
    """Input of a loss for the tokens that are trained on; 0 at all others.

    Attributes:
      logprobs: f32[R, T], log pi, the only input with a gradient.
      anchor: f32[R, T], log-probs that ratios are taken against (see `policy_loss`).
      behaviour: f32[R, T], log-probs of the policy that sampled.
      advantages: f32[R, T], or [R, 1] if all tokens of a row have the same one.
      mask: bool[R, T]. Rows are whole: a sum over axis 1 is over the sample.
      log_ratio_clamp: nats, bounds every log-ratio before exp.
    """

    logprobs: jax.Array
    anchor: jax.Array
    behaviour: jax.Array
    advantages: jax.Array
    mask: jax.Array
    log_ratio_clamp: float = 20.0

    @property
    def ratio(self) -> jax.Array:
        """pi / anchor of each token, f32[R, T]."""
        return ratio_of(self.logprobs, self.anchor, self.log_ratio_clamp)

    @property
    def sequence_ratio(self) -> jax.Array:
        """The geometric mean of a row's ratios, f32[R, 1]: (pi / anchor)^(1 / tokens) of the
        sample.
        """
        length_R = jnp.maximum(jnp.sum(self.mask, axis=1, keepdims=True, dtype=jnp.float32), 1.0)
        log_ratio_R = jnp.sum(self.logprobs - self.anchor, axis=1, keepdims=True) / length_R
        return jnp.exp(jnp.clip(log_ratio_R, -self.log_ratio_clamp, self.log_ratio_clamp))


# tokens -> (loss per token f32[R, T], {name: [R, T], logged as mean over tokens}); [R, 1] applies
# to all tokens of a row.
LossFn = Callable[[Tokens], tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Pg:
    """REINFORCE: -A log pi."""

    def __call__(self, tokens: Tokens):
        return -tokens.advantages * tokens.logprobs, {}


@dataclasses.dataclass(frozen=True)
class _Clipped:
    """A loss that keeps ratios within [1 - clip_low, 1 + clip_high]."""

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self):
        for name in ("clip_low", "clip_high"):
            value = getattr(self, name)
            if isinstance(value, (int, float)) and value < 0:
                raise ValueError(f"{name} must not be negative, got {value!r}.")


@dataclasses.dataclass(frozen=True)
class Ppo(_Clipped):
    """-min(A r, A clip(r, 1 - clip_low, 1 + clip_high)); with dual_clip = c > 1, if A < 0 also
    -max(that min, A c).

    Source: clip-higher: DAPO (arXiv 2503.14476); dual clip: Ye et al. (arXiv
    1912.09729).
    """

    dual_clip: float = 0.0  # 0: off; else the bound c > 1 for negative advantages

    def __post_init__(self):
        super().__post_init__()
        c = self.dual_clip
        if isinstance(c, (int, float)) and c and c <= 1:
            raise ValueError(f"dual_clip must exceed 1 (0 turns it off), got {c!r}.")

    def __call__(self, tokens: Tokens):
        ratio_RxT = tokens.ratio
        advantage_RxT = tokens.advantages
        bounded_RxT, held = clip_where_ppo_does(
            ratio_RxT, advantage_RxT, self.clip_low, self.clip_high
        )
        if self.dual_clip is not None and not is_zero(self.dual_clip):
            held["clip_dual"] = (advantage_RxT < 0) & (ratio_RxT > self.dual_clip)
            bounded_RxT = jnp.where(held["clip_dual"], self.dual_clip, bounded_RxT)
        return -advantage_RxT * bounded_RxT, held


@dataclasses.dataclass(frozen=True)
class Tis:
    """-A min(r, truncation) log pi, no gradient through r: truncated importance sampling."""

    truncation: float = 2.0  # largest importance weight

    def __call__(self, tokens: Tokens):
        ratio_RxT = tokens.ratio
        weight_RxT = jax.lax.stop_gradient(jnp.minimum(ratio_RxT, self.truncation))
        return -tokens.advantages * weight_RxT * tokens.logprobs, {
            "weight_truncated": ratio_RxT > self.truncation
        }


@dataclasses.dataclass(frozen=True)
class Gspo(_Clipped):
    """PPO's minimum for whole samples: the ratio is the geometric mean over the sample, clipped
    once.

    Source: Zheng et al. (arXiv 2507.18071), equations 5 to 7, with "seq_mean_token_mean"; its
    bounds are the defaults.
    """

    clip_low: float = 3e-4
    clip_high: float = 4e-4

    def __call__(self, tokens: Tokens):
        bounded_Rx1, held = clip_where_ppo_does(
            tokens.sequence_ratio, tokens.advantages, self.clip_low, self.clip_high
        )
        return -tokens.advantages * bounded_Rx1, held


@dataclasses.dataclass(frozen=True)
class Cispo(_Clipped):
    """-A clip(r, 1 - clip_low, 1 + clip_high) log pi, no gradient through the clipped weight: every
    token keeps a gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), which bounds only from above: clip_low = 1.
    """

    def __call__(self, tokens: Tokens):
        low = 1.0 - self.clip_low
        high = 1.0 + self.clip_high
        ratio_RxT = tokens.ratio
        weight_RxT = jax.lax.stop_gradient(jnp.clip(ratio_RxT, low, high))
        held = {"clip_low": ratio_RxT < low, "clip_high": ratio_RxT > high}
        return -tokens.advantages * weight_RxT * tokens.logprobs, held


# Losses by the word that settings call them.
LOSSES: dict[str, Callable[..., LossFn]] = {
    "pg": Pg,
    "ppo": Ppo,
    "tis": Tis,
    "gspo": Gspo,
    "cispo": Cispo,
}


def loss_named(word: str, settings: Mapping[str, Any] = {}) -> LossFn:
    """The loss of `LOSSES` with those of the numbers that it takes.

    Raises TypeError: a number that no loss of `LOSSES` takes.
    """
    takes = _numbers(LOSSES[word])
    if unknown := set(settings).difference(*map(_numbers, LOSSES.values())):
        raise TypeError(
            f"no loss takes {', '.join(sorted(unknown))}; this one takes "
            f"{', '.join(takes) or 'no settings'}."
        )
    return LOSSES[word](**{name: value for name, value in settings.items() if name in takes})


def _numbers(loss: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(loss)]


def clip_where_ppo_does(
    ratio, advantages, clip_low, clip_high
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the ratio, replaced by a bound if PPO's minimum takes the clipped side; masks of ratios at
    the low and at the high bound).

    Uses explicit conditions, because min, max and clip halve the gradient at ties, where every
    first step starts.
    """
    low = (advantages < 0) & (ratio < 1.0 - clip_low)
    high = (advantages > 0) & (ratio > 1.0 + clip_high)
    bounded = jnp.where(low, 1.0 - clip_low, ratio)
    bounded = jnp.where(high, 1.0 + clip_high, bounded)
    return bounded, {"clip_low": low, "clip_high": high}


def check_loss(loss: LossFn) -> None:
    """Tries a loss on a batch of two rows of three tokens, without computing anything.

    Raises ValueError: it does not take tokens alone, or its result is not ([R, T], {name: [R, T]}).
    """
    number = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    tokens = Tokens(number, number, number, number, jax.ShapeDtypeStruct((2, 3), jnp.bool_))
    try:
        jax.eval_shape(lambda *arrays: call_loss(loss, Tokens(*arrays)), *tokens[:5])
    except ValueError:
        raise
    except Exception as error:  # a function of the user's own may raise anything
        raise ValueError(
            f"called with tokens of shape (2, 3), it raised {type(error).__name__}: {error}"
        ) from error


def call_loss(loss: LossFn, tokens: Tokens):
    """Calls the loss, and checks its results."""
    shape = tokens.mask.shape
    found = loss(tokens)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise ValueError(
            "a loss returns (loss per token [R, T], {name: [R, T], to be logged}), and "
            "this one something else."
        )
    per_token, logged = found
    for name, array in {"the loss per token": per_token, **logged}.items():
        if jnp.shape(array) not in (shape, (shape[0], 1)):
            raise ValueError(
                f"a loss of tokens of shape {shape} returned {name} of shape {jnp.shape(array)}."
            )
    if taken := set(logged) & OWN_SUMS:
        raise ValueError(
            f"a loss logs {', '.join(sorted(taken))}, which is a metric of every loss already."
        )

    def whole(x):
        return jnp.broadcast_to(x, shape)

    return whole(per_token), {name: whole(x) for name, x in logged.items()}


def ratio_of(log_numerator, log_denominator, log_ratio_clamp):
    """exp of the difference, clamped to log_ratio_clamp nats."""
    return jnp.exp(jnp.clip(log_numerator - log_denominator, -log_ratio_clamp, log_ratio_clamp))


def is_zero(coefficient) -> bool:
    """Whether the coefficient is 0. A traced one counts as set."""
    return isinstance(coefficient, (int, float)) and coefficient == 0
