"""Token weights, the policy loss, and metrics that add up over micro-batches.

How a result stays independent of micro-batching and sharding: every loss here
is sum(weights * per_token), and `token_weights` computes the weights once, on
the global batch, with all the means inside them. Micro-batches slice the
weights with everything else and their losses and gradients simply add.

A loss is a function of its tokens and of the numbers that it takes, and is
known by its name in `LOSSES`:

    def pg(tokens: Tokens):
        return -tokens.advantages * tokens.logprobs, {}

`policy_loss` does the rest: masks, weights, stale samples, KL, entropy, metrics.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rl_speed.objectives import divergences

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "token_sum_constant",
)
CORRECTIONS = ("behaviour", "recompute")


def _choose(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"Unknown {name} {value!r}; choose one of {allowed}.")


class Tokens(NamedTuple):
    """What a loss is given of the tokens that are trained on; 0 at all others.

    Attributes:
      logprobs: f32[R, T], log pi, the only one with a gradient.
      anchor: f32[R, T], log-probs that ratios are taken against (see `policy_loss`).
      behaviour: f32[R, T], log-probs of the policy that sampled.
      advantages: f32[R, T], or [R, 1] where all tokens of a row have one.
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
        return _ratio_of(self.logprobs, self.anchor, self.log_ratio_clamp)

    @property
    def sequence_ratio(self) -> jax.Array:
        """The geometric mean of a row's ratios, f32[R, 1]: (pi / anchor)^(1 / tokens) of the sample."""
        length_R = jnp.maximum(jnp.sum(self.mask, axis=1, keepdims=True, dtype=jnp.float32), 1.0)
        log_ratio_R = jnp.sum(self.logprobs - self.anchor, axis=1, keepdims=True) / length_R
        return jnp.exp(jnp.clip(log_ratio_R, -self.log_ratio_clamp, self.log_ratio_clamp))


# (tokens, *, numbers by name, each with a default) -> (loss per token f32[R, T], {name: [R, T], whose mean over tokens is logged});
# [R, 1] is for all tokens of a row.
LossFn = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def pg(tokens: Tokens):
    """REINFORCE: -A log pi."""
    return -tokens.advantages * tokens.logprobs, {}


def ppo(tokens: Tokens, *, clip_low=0.2, clip_high=0.2, dual_clip=None):
    """-min(A r, A clip(r, 1 - clip_low, 1 + clip_high)); with dual_clip = c > 1, where A < 0 also -max(that min, A c).

    Source: methods.md section 5; clip-higher: DAPO (arXiv 2503.14476); dual clip (None or 0: off): Ye et al. (arXiv 1912.09729).
    """
    _require_bounds(clip_low, clip_high)
    ratio_RxT, advantage_RxT = tokens.ratio, tokens.advantages
    bounded_RxT, held = clip_where_ppo_does(ratio_RxT, advantage_RxT, clip_low, clip_high)
    if dual_clip is not None and not _is_zero(dual_clip):
        if isinstance(dual_clip, (int, float)) and dual_clip <= 1:
            raise ValueError(f"dual_clip must exceed 1 (None turns it off), got {dual_clip!r}.")
        held["clip_dual"] = (advantage_RxT < 0) & (ratio_RxT > dual_clip)
        bounded_RxT = jnp.where(held["clip_dual"], dual_clip, bounded_RxT)
    return -advantage_RxT * bounded_RxT, held


def tis(tokens: Tokens, *, truncation=2.0):
    """-A min(r, truncation) log pi, no gradient through r: truncated importance sampling."""
    ratio_RxT = tokens.ratio
    weight_RxT = jax.lax.stop_gradient(jnp.minimum(ratio_RxT, truncation))
    return -tokens.advantages * weight_RxT * tokens.logprobs, {"weight_truncated": ratio_RxT > truncation}


def gspo(tokens: Tokens, *, clip_low=3e-4, clip_high=4e-4):
    """PPO's minimum of whole samples: the ratio is the geometric mean of the sample's, and clipped as one.

    With "seq_mean_token_mean" the loss is the mean over samples of the source (Zheng et al., arXiv 2507.18071, equations 5 to 7,
    whose bounds are the defaults).
    """
    _require_bounds(clip_low, clip_high)
    bounded_Rx1, held = clip_where_ppo_does(tokens.sequence_ratio, tokens.advantages, clip_low, clip_high)
    return -tokens.advantages * bounded_Rx1, held


def cispo(tokens: Tokens, *, clip_low=0.2, clip_high=0.2):
    """-A clip(r, 1 - clip_low, 1 + clip_high) log pi, no gradient through the clipped weight: no token is left out.

    Source: MiniMax-M1 (arXiv 2506.13585), which bounds from above alone; clip_low = 1 is that.
    """
    _require_bounds(clip_low, clip_high)
    ratio_RxT = tokens.ratio
    weight_RxT = jax.lax.stop_gradient(jnp.clip(ratio_RxT, 1.0 - clip_low, 1.0 + clip_high))
    held = {"clip_low": ratio_RxT < 1.0 - clip_low, "clip_high": ratio_RxT > 1.0 + clip_high}
    return -tokens.advantages * weight_RxT * tokens.logprobs, held


LOSSES: dict[str, LossFn] = {"pg": pg, "ppo": ppo, "tis": tis, "gspo": gspo, "cispo": cispo}


def clip_where_ppo_does(ratio, advantages, clip_low, clip_high) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(the ratio, held at a bound where PPO's minimum takes the clipped side; which are held at the low and at the high one).

    Spelled out as "which are held at a bound" and not as min, max and clip: those halve the gradient at ties, where every first
    step stands.
    """
    low = (advantages < 0) & (ratio < 1.0 - clip_low)
    high = (advantages > 0) & (ratio > 1.0 + clip_high)
    bounded = jnp.where(low, 1.0 - clip_low, ratio)
    bounded = jnp.where(high, 1.0 + clip_high, bounded)
    return bounded, {"clip_low": low, "clip_high": high}


def settings_of(loss: LossFn) -> dict[str, Any]:
    """The numbers that a loss takes, by name, with their defaults."""
    return {name: p.default for name, p in inspect.signature(loss).parameters.items() if p.kind is p.KEYWORD_ONLY}


def check_loss(loss: LossFn, settings: Mapping[str, Any]) -> None:
    """Try a loss on a batch of two rows of three tokens, without computing anything.

    Raises ValueError: it does not take (tokens, *, numbers), or does not return ([R, T], {name: [R, T]}), or refuses `settings`.
    """
    parameters = list(inspect.signature(loss).parameters.values())
    wrong = [p.name for p in parameters[1:] if p.kind is not p.KEYWORD_ONLY or p.default is p.empty]
    if not parameters or parameters[0].kind not in (parameters[0].POSITIONAL_ONLY, parameters[0].POSITIONAL_OR_KEYWORD) or wrong:
        raise ValueError(f"a loss takes its tokens, and behind a * the numbers it needs, each with a default; this one takes "
                         f"({', '.join(map(str, parameters))})")
    number = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    tokens = Tokens(number, number, number, number, jax.ShapeDtypeStruct((2, 3), jnp.bool_))
    try:
        jax.eval_shape(lambda *arrays: _call_loss(loss, Tokens(*arrays), settings), *tokens[:5])
    except ValueError:
        raise
    except Exception as error:  # whatever a function of the user's own raises
        raise ValueError(f"called with tokens of shape (2, 3), it raised {type(error).__name__}: {error}") from error


def token_weights(
    mask,
    aggregation: str = "token_mean",
    constant=None,
    *,
    lengths=None,
    num_tokens=None,
    num_sequences=None,
) -> jax.Array:
    """Weights [R, T] such that loss = sum(weights * per_token).

      token_mean            1 / tokens of the batch (DAPO)
      seq_mean_token_mean   1 / (sequences * tokens of the row) (GRPO)
      seq_mean_token_sum    1 / sequences
      token_sum_constant    1 / constant (Dr. GRPO). Its released code divides each
                            row by the maximum response length and averages over
                            rows: constant = rows * max_response_length

    Call it on the *global* batch, before cutting micro-batches.

    Args:
      mask: [R, T], True (or nonzero) at the tokens that are trained on. Rows with
        none get weight 0 and do not count as sequences.
      aggregation: one of `AGGREGATIONS`.
      constant: the divisor of token_sum_constant; only allowed there.
      lengths: [R], what counts as a row's number of tokens instead of its unmasked
        ones, e.g. prefix + suffix where the prefix is masked (RPO). Changes
        denominators only.
      num_tokens, num_sequences: global counts to divide by instead of this mask's,
        when the global batch lives in several arrays (length buckets).

    Returns: f32[R, T], exactly 0 where mask is False; all 0 for an empty batch.

    Raises:
      ValueError: unknown aggregation, or a constant missing, misplaced or not
        positive.

    Source: methods.md section 5.
    """
    _choose("aggregation", aggregation, AGGREGATIONS)
    if (aggregation == "token_sum_constant") != (constant is not None):
        raise ValueError(
            "constant belongs to aggregation='token_sum_constant' and to no other: got "
            f"aggregation={aggregation!r}, constant={constant!r}. Dr. GRPO uses "
            "rows * maximum response length."
        )
    if isinstance(constant, (int, float)) and constant <= 0:
        raise ValueError(f"constant must be positive, got {constant!r}.")
    mask = jnp.asarray(mask).astype(bool)
    nonempty_R = jnp.any(mask, axis=1)
    if lengths is None:
        # Counted in integers: exact beyond 2**24 tokens.
        length_R = jnp.sum(mask, axis=1, dtype=jnp.int32)
    else:
        length_R = jnp.where(nonempty_R, jnp.asarray(lengths), 0)
    if num_tokens is None:
        num_tokens = jnp.sum(length_R)
    if num_sequences is None:
        num_sequences = jnp.sum(nonempty_R, dtype=jnp.int32)

    if aggregation == "token_mean":
        divisor_R = jnp.full(mask.shape[:1], num_tokens)
    elif aggregation == "seq_mean_token_mean":
        divisor_R = length_R.astype(jnp.float32) * num_sequences
    elif aggregation == "seq_mean_token_sum":
        divisor_R = jnp.full(mask.shape[:1], num_sequences)
    else:
        divisor_R = jnp.full(mask.shape[:1], constant)
    divisor_R = jnp.where(nonempty_R, divisor_R.astype(jnp.float32), 1.0)
    return jnp.where(mask, (1.0 / divisor_R)[:, None], 0.0)


def policy_loss(
    logprobs,
    behaviour_logprobs,
    advantages,
    mask,
    *,
    weights=None,
    aggregation: str = "token_mean",
    constant=None,
    loss: str | LossFn = "ppo",
    truncation=2.0,
    log_ratio_clamp=20.0,
    old_logprobs=None,
    correction: str = "behaviour",
    ref_logprobs=None,
    kl_coef=0.0,
    kl_kind: str = "k3",
    entropy=None,
    entropy_coef=0.0,
    **settings,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Policy-gradient loss on sampled tokens, and its metrics.

    Per token, with advantage A, log pi = logprobs, and the anchor a that the
    ratio r = exp(clamp(log pi - log a)) is taken against, `loss` says what is
    minimised: "pg", "ppo", "tis" and the other functions of `LOSSES`, where each
    has its formula, or a function like them.

    Gradients flow through log pi (and `entropy`) only. At log pi = log a "pg",
    "ppo" and "tis" have exactly the gradient of -A log pi, also with clip bounds of 0.

    Stale samples. What sampled is `behaviour_logprobs`; `old_logprobs`, if given,
    is the policy just before the update, recomputed by the trainer.
      old_logprobs None                  the anchor is the behaviour policy
      correction "recompute"             the anchor is old_logprobs, and stale data
                                         counts as on-policy (as SPEED released);
                                         needs old_logprobs
      correction "behaviour" (default)   the anchor is old_logprobs and the token's
        with old_logprobs                loss is multiplied by the truncated weight
                                         min(exp(log old - log behaviour), truncation),
                                         which also absorbs the difference between
                                         the sampler's and the trainer's numerics

    The KL to `ref_logprobs` and the entropy bonus are then added per token:
    + kl_coef * kl(log pi, log ref) - entropy_coef * entropy.

    Args:
      logprobs: f32[R, T], differentiated; at the temperature that sampled.
      behaviour_logprobs: f32[R, T].
      advantages: f32[R], or f32[R, T] for token-level ones; constants.
      mask: [R, T], True at the tokens that are trained on. Whatever stands
        elsewhere, NaN included, changes nothing and gets gradient 0.
      weights: f32[R, T] from `token_weights` on the global batch, sliced like the
        rest; None computes them here from aggregation and constant, right only if
        this is the whole batch.
      aggregation, constant: see `token_weights`; ignored when weights is given.
      loss: a name in `LOSSES`, or a `LossFn`. correction, kl_kind: static strings.
      truncation: of the correction's weights, and of "tis". log_ratio_clamp (nats)
        bounds every log-ratio before exp; beyond it the gradient is 0.
      settings: numbers of the loss by name: clip_low, clip_high, dual_clip (0.2,
        0.2, None) for "ppo". Those that only another loss of `LOSSES` takes are not
        looked at, so that one set of settings serves them all.
      ref_logprobs: f32[R, T] or None.
      entropy: f32[R, T], per-token entropy of the policy in nats, or None.
      kl_coef, entropy_coef: numbers, or traced scalars for schedules.

    Returns:
      loss: f32 scalar, to minimise.
      metrics: dict of f32 scalars. Every entry accumulates over micro-batches,
        and zeros are the identity. The prefix says how (`merge_metrics`):
          "loss/..."  total, policy, kl, entropy: weighted like the loss and with
                      their coefficients, so policy + kl + entropy = total; add.
          "sum/..."   sums over unmasked tokens; add, then divide by "sum/tokens"
                      for the mean: ratio (r; where "pg" ignores it too), clip_low
                      and clip_high (held at that bound), clip_dual, weight_truncated
                      (importance weight cut at truncation), each 0 for a loss that has
                      none; what else the loss returns by name; correction (the weight
                      of stale tokens, 1 without), kl_behaviour (k3 estimate of KL(behaviour || pi)),
                      behaviour_gap (|log pi - log behaviour|, nats) and
                      behaviour_gap_exp (its exponential), kl_ref and entropy if
                      given. Also tokens, and sequences (rows with a token).
          "max/..."   behaviour_gap; combine by maximum.
        `summarise_metrics` turns the totals into the means to log.

    Raises:
      ValueError: unknown option, mismatched shapes, a coefficient without its
        input, or a bound out of range.
      TypeError: a setting that no loss takes.

    Source: methods.md section 5.
    """
    if isinstance(loss, str):
        _choose("loss", loss, tuple(LOSSES))
        loss = LOSSES[loss]
    _choose("correction", correction, CORRECTIONS)
    mask = jnp.asarray(mask).astype(bool)
    _check_arguments(
        mask,
        {
            "logprobs": logprobs,
            "behaviour_logprobs": behaviour_logprobs,
            "weights": weights,
            "old_logprobs": old_logprobs,
            "ref_logprobs": ref_logprobs,
            "entropy": entropy,
        },
    )
    if correction == "recompute" and old_logprobs is None:
        raise ValueError("correction='recompute' needs old_logprobs.")
    if ref_logprobs is None and not _is_zero(kl_coef):
        raise ValueError("kl_coef is set but ref_logprobs is missing.")
    if entropy is None and not _is_zero(entropy_coef):
        raise ValueError("entropy_coef is set but entropy is missing.")
    if isinstance(truncation, (int, float)) and truncation <= 0:
        raise ValueError(f"truncation must be positive, got {truncation!r}.")

    def masked(x):
        return jnp.where(mask, jnp.asarray(x).astype(jnp.float32), 0.0)

    def constant_of(x):
        return jax.lax.stop_gradient(masked(x))

    advantages = jnp.asarray(advantages)
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    if advantages.ndim != 2 or advantages.shape[0] != mask.shape[0] or (
        advantages.shape[1] not in (1, mask.shape[1])
    ):
        raise ValueError(
            f"advantages must be [R] or [R, T] with [R, T] = {mask.shape}; got "
            f"{advantages.shape}."
        )
    if weights is None:
        weights = token_weights(mask, aggregation, constant)
    weights_RxT = constant_of(weights)
    advantage_RxT = constant_of(advantages)
    logp_RxT = masked(logprobs)
    behaviour_RxT = constant_of(behaviour_logprobs)
    anchor_RxT = behaviour_RxT if old_logprobs is None else constant_of(old_logprobs)
    tokens = Tokens(logp_RxT, anchor_RxT, behaviour_RxT, advantage_RxT, mask, log_ratio_clamp)

    truncated = jnp.zeros_like(mask)
    correction_RxT = jnp.ones_like(logp_RxT)
    if old_logprobs is not None and correction == "behaviour":
        importance_RxT = _ratio_of(anchor_RxT, behaviour_RxT, log_ratio_clamp)
        truncated = importance_RxT > truncation
        correction_RxT = jnp.minimum(importance_RxT, truncation)

    policy_RxT, of_loss = _call_loss(loss, tokens, {"truncation": truncation, **settings})
    parts = {"policy": jnp.sum(weights_RxT * correction_RxT * policy_RxT)}

    gap_RxT = jnp.abs(logp_RxT - behaviour_RxT)
    sums = {
        "tokens": mask,
        "ratio": tokens.ratio,
        **{name: jnp.zeros_like(mask) for name in _STANDARD_SUMS},
        **of_loss,
        "weight_truncated": truncated | of_loss.get("weight_truncated", jnp.zeros_like(mask)),
        "correction": correction_RxT,
        "kl_behaviour": divergences.kl(behaviour_RxT, logp_RxT, "k3", log_ratio_clamp),
        "behaviour_gap": gap_RxT,
        "behaviour_gap_exp": jnp.exp(jnp.minimum(gap_RxT, log_ratio_clamp)),
    }
    if ref_logprobs is not None:
        kl_RxT = divergences.kl(logp_RxT, constant_of(ref_logprobs), kl_kind, log_ratio_clamp)
        parts["kl"] = kl_coef * jnp.sum(weights_RxT * kl_RxT)
        sums["kl_ref"] = kl_RxT
    if entropy is not None:
        entropy_RxT = masked(entropy)
        parts["entropy"] = -entropy_coef * jnp.sum(weights_RxT * entropy_RxT)
        sums["entropy"] = entropy_RxT
    total = sum(parts.values())

    metrics = {"loss/total": total} | {f"loss/{k}": v for k, v in parts.items()}
    metrics |= {f"sum/{name}": jnp.sum(masked(x)) for name, x in sums.items()}
    metrics["sum/sequences"] = jnp.sum(jnp.any(mask, axis=1)).astype(jnp.float32)
    metrics["max/behaviour_gap"] = jnp.max(gap_RxT, initial=0.0)
    return total, jax.lax.stop_gradient(metrics)


def merge_metrics(first, *others):
    """Combines `policy_loss` metrics of micro-batches: "max/" by maximum, else sum.

    Jittable, associative, with all-zero metrics as identity, so it serves as the
    body of a scan. Raises ValueError if the dicts hold different entries.
    """
    for other in others:
        if other.keys() != first.keys():
            raise ValueError(
                "Metrics of different losses cannot be merged; they differ in "
                f"{sorted(other.keys() ^ first.keys())}."
            )
        first = {
            name: jnp.maximum(value, other[name])
            if name.startswith("max/")
            else value + other[name]
            for name, value in first.items()
        }
    return first


def summarise_metrics(metrics):
    """Turns accumulated `policy_loss` metrics into the values to log.

    Returns a dict of scalars: loss, loss_policy, loss_kl, loss_entropy (as
    accumulated), tokens and sequences (counts), `<name>_max`, and every other
    "sum/" entry as its mean per unmasked token (0 if there was none).
    """
    tokens = jnp.maximum(metrics["sum/tokens"], 1.0)
    out = {}
    for key, value in metrics.items():
        kind, name = key.split("/")
        if kind == "loss":
            out["loss" if name == "total" else f"loss_{name}"] = value
        elif kind == "max":
            out[f"{name}_max"] = value
        elif name in ("tokens", "sequences"):
            out[name] = value
        else:
            out[name] = value / tokens
    return out


# What every loss is logged with, 0 where it has none; and what belongs to `policy_loss` itself.
_STANDARD_SUMS = ("clip_low", "clip_high", "clip_dual", "weight_truncated")
_OWN_SUMS = ("tokens", "sequences", "ratio", "correction", "kl_behaviour", "behaviour_gap", "behaviour_gap_exp", "kl_ref", "entropy")


def _ratio_of(log_numerator, log_denominator, log_ratio_clamp):
    return jnp.exp(jnp.clip(log_numerator - log_denominator, -log_ratio_clamp, log_ratio_clamp))


def _call_loss(loss, tokens, settings):
    """The loss with those of `settings` that it takes, its results checked."""
    takes, shape = settings_of(loss), tokens.mask.shape
    known = set(takes).union(*map(settings_of, LOSSES.values()))
    if unknown := set(settings) - known:
        raise TypeError(f"no loss takes {', '.join(sorted(unknown))}; this one takes {', '.join(takes) or 'no settings'}.")
    found = loss(tokens, **{name: value for name, value in settings.items() if name in takes})
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)):
        raise ValueError("a loss returns (loss per token [R, T], {name: [R, T], to be logged}), and this one something else.")
    per_token, logged = found
    for name, array in {"the loss per token": per_token, **logged}.items():
        if jnp.shape(array) not in (shape, (shape[0], 1)):
            raise ValueError(f"a loss of tokens of shape {shape} returned {name} of shape {jnp.shape(array)}.")
    if taken := set(logged) & set(_OWN_SUMS):
        raise ValueError(f"a loss logs {', '.join(sorted(taken))}, which is a metric of every loss already.")
    whole = lambda x: jnp.broadcast_to(x, shape)
    return whole(per_token), {name: whole(x) for name, x in logged.items()}


def _require_bounds(clip_low, clip_high):
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if isinstance(value, (int, float)) and value < 0:
            raise ValueError(f"{name} must not be negative, got {value!r}.")


def _is_zero(coefficient):
    # A traced coefficient cannot be inspected: it counts as set.
    return isinstance(coefficient, (int, float)) and coefficient == 0


def _check_arguments(mask, arrays):
    if mask.ndim != 2:
        raise ValueError(f"mask must be [R, T]; got shape {mask.shape}.")
    for name, array in arrays.items():
        if array is not None and jnp.shape(array) != mask.shape:
            raise ValueError(
                f"{name} must have the shape of mask, {mask.shape}; got {jnp.shape(array)}."
            )
