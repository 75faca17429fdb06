"""Losses per token. Each is a function of its tokens and its numbers, with a name in `LOSSES`:

    def pg(tokens: Tokens):
        return -tokens.advantages * tokens.logprobs, {}

`policy_loss` (batch_loss.py) does the rest: masks, weights, stale samples, KL, entropy, metrics.
"""

import inspect
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


# (tokens, *, numbers by name, each with a default) -> (loss per token f32[R, T], {name: [R, T],
# logged as mean over tokens}); [R, 1] applies to all tokens of a row.
LossFn = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def pg(tokens: Tokens):
    """REINFORCE: -A log pi."""
    return -tokens.advantages * tokens.logprobs, {}


def ppo(tokens: Tokens, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    """-min(A r, A clip(r, 1 - clip_low, 1 + clip_high)); with dual_clip = c > 1, if A < 0 also
    -max(that min, A c).

    Source: methods.md section 5; clip-higher: DAPO (arXiv 2503.14476); dual clip (None or 0: off):
    Ye et al. (arXiv 1912.09729).
    """
    _require_bounds(clip_low, clip_high)
    ratio_RxT = tokens.ratio
    advantage_RxT = tokens.advantages
    bounded_RxT, held = clip_where_ppo_does(ratio_RxT, advantage_RxT, clip_low, clip_high)
    if dual_clip is not None and not is_zero(dual_clip):
        if isinstance(dual_clip, (int, float)) and dual_clip <= 1:
            raise ValueError(f"dual_clip must exceed 1 (None turns it off), got {dual_clip!r}.")
        held["clip_dual"] = (advantage_RxT < 0) & (ratio_RxT > dual_clip)
        bounded_RxT = jnp.where(held["clip_dual"], dual_clip, bounded_RxT)
    return -advantage_RxT * bounded_RxT, held


def tis(tokens: Tokens, *, truncation=2.0):
    """-A min(r, truncation) log pi, no gradient through r: truncated importance sampling."""
    ratio_RxT = tokens.ratio
    weight_RxT = jax.lax.stop_gradient(jnp.minimum(ratio_RxT, truncation))
    return -tokens.advantages * weight_RxT * tokens.logprobs, {
        "weight_truncated": ratio_RxT > truncation
    }


def gspo(tokens: Tokens, *, clip_low=3e-4, clip_high=4e-4):
    """PPO's minimum for whole samples: the ratio is the geometric mean over the sample.

    Source: Zheng et al. (arXiv 2507.18071), equations 5 to 7, with "seq_mean_token_mean"; its
    bounds are the defaults.
    """
    _require_bounds(clip_low, clip_high)
    bounded_Rx1, held = clip_where_ppo_does(
        tokens.sequence_ratio, tokens.advantages, clip_low, clip_high
    )
    return -tokens.advantages * bounded_Rx1, held


def cispo(tokens: Tokens, *, clip_low=0.2, clip_high=0.2):
    """-A clip(r, 1 - clip_low, 1 + clip_high) log pi, no gradient through the clipped weight: every
    token keeps a gradient.

    Source: MiniMax-M1 (arXiv 2506.13585), which bounds only from above: clip_low = 1.
    """
    _require_bounds(clip_low, clip_high)
    ratio_RxT = tokens.ratio
    weight_RxT = jax.lax.stop_gradient(jnp.clip(ratio_RxT, 1.0 - clip_low, 1.0 + clip_high))
    held = {"clip_low": ratio_RxT < 1.0 - clip_low, "clip_high": ratio_RxT > 1.0 + clip_high}
    return -tokens.advantages * weight_RxT * tokens.logprobs, held


LOSSES: dict[str, LossFn] = {"pg": pg, "ppo": ppo, "tis": tis, "gspo": gspo, "cispo": cispo}


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


def settings_of(loss: LossFn) -> dict[str, Any]:
    """Numbers of a loss by name, with their defaults."""
    return {
        name: p.default
        for name, p in inspect.signature(loss).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }


def check_loss(loss: LossFn, settings: Mapping[str, Any]) -> None:
    """Tries a loss on a batch of two rows of three tokens, without computing anything.

    Raises ValueError: its arguments are not (tokens, *, numbers), its result is not ([R, T], {name:
    [R, T]}), or it refuses `settings`.
    """
    parameters = list(inspect.signature(loss).parameters.values())
    wrong = [p.name for p in parameters[1:] if p.kind is not p.KEYWORD_ONLY or p.default is p.empty]
    if (
        not parameters
        or parameters[0].kind
        not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD)
        or wrong
    ):
        raise ValueError(
            "a loss takes its tokens, and behind a * the numbers it needs, each with a default; "
            f"this one takes ({', '.join(map(str, parameters))})"
        )
    number = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    tokens = Tokens(number, number, number, number, jax.ShapeDtypeStruct((2, 3), jnp.bool_))
    try:
        jax.eval_shape(lambda *arrays: call_loss(loss, Tokens(*arrays), settings), *tokens[:5])
    except ValueError:
        raise
    except Exception as error:  # a function of the user's own may raise anything
        raise ValueError(
            f"called with tokens of shape (2, 3), it raised {type(error).__name__}: {error}"
        ) from error


def call_loss(loss: LossFn, tokens: Tokens, settings: Mapping[str, Any]):
    """Calls the loss with its numbers from `settings`, and checks its results."""
    takes = settings_of(loss)
    shape = tokens.mask.shape
    known = set(takes).union(*map(settings_of, LOSSES.values()))
    if unknown := set(settings) - known:
        raise TypeError(
            f"no loss takes {', '.join(sorted(unknown))}; this one takes "
            f"{', '.join(takes) or 'no settings'}."
        )
    found = loss(tokens, **{name: value for name, value in settings.items() if name in takes})
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


def _require_bounds(clip_low, clip_high):
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"{name} must not be negative, got {value!r}.")


def ratio_of(log_numerator, log_denominator, log_ratio_clamp):
    """exp of the difference, clamped to log_ratio_clamp nats."""
    return jnp.exp(jnp.clip(log_numerator - log_denominator, -log_ratio_clamp, log_ratio_clamp))


def is_zero(coefficient) -> bool:
    """Whether the coefficient is 0. A traced one counts as set."""
    return isinstance(coefficient, (int, float)) and coefficient == 0
