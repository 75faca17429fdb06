"""The policy loss of a batch: the loss per token, weighted so that micro-batches and shards add up.

Every loss here is sum(weights * per_token). `token_weights` computes the weights, with all means,
once on the global batch. Micro-batches and shards slice them, so their losses and gradients add up.
"""

import jax
import jax.numpy as jnp

from rl_speed.objectives import divergences
from rl_speed.objectives.losses import (
    LOSSES,
    LossFn,
    Tokens,
    call_loss,
    is_zero,
    loss_named,
    ratio_of,
)

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "token_sum_constant",
    "micro_token_mean",
)
CORRECTIONS = ("behaviour", "recompute")


def _choose(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"Unknown {name} {value!r}; choose one of {allowed}.")


def token_weights(
    mask,
    aggregation: str = "token_mean",
    constant=None,
    *,
    micro_rows: int = 4,
    lengths=None,
    num_tokens=None,
    num_sequences=None,
) -> jax.Array:
    """Weights [R, T] such that loss = sum(weights * per_token).

      token_mean            1 / tokens of the batch (DAPO)
      seq_mean_token_mean   1 / (sequences * tokens of the row) (GRPO)
      seq_mean_token_sum    1 / sequences
      token_sum_constant    1 / constant (Dr. GRPO, as released: rows * max_response_length)
      micro_token_mean      1 / (micro-batches * tokens of the micro-batch) (verl's "token-mean",
                            which it computes for each micro-batch)

    Micro-batches of "micro_token_mean" are `micro_rows` successive rows of the batch each, the last
    one the rest; rows without a token are skipped. They are part of the loss, and say nothing about
    how it is computed. The order of the rows matters here alone.

    Args:
      mask: [R, T], True at the tokens that are trained on, of the *global* batch. Rows with none
        get weight 0 and do not count as sequences.
      constant: the divisor of token_sum_constant; only allowed there.
      micro_rows: rows of a micro-batch.
      lengths: [R], tokens of a row in place of its unmasked ones, such as prefix + suffix if the
        prefix is masked (RPO). Changes only denominators.
      num_tokens, num_sequences: global counts to divide by instead of this mask's, if the global
        batch is in several arrays. Not for micro_token_mean.

    Returns: f32[R, T], exactly 0 where mask is False; all 0 for an empty batch.

    Raises:
      ValueError: unknown aggregation, a constant missing, misplaced or not positive, or
        micro_rows not positive.

    Source: token means: DAPO (arXiv 2503.14476), section 3.3; means of samples: DeepSeekMath (arXiv
    2402.03300); a constant: Dr. GRPO (arXiv 2503.20783).
    """
    _choose("aggregation", aggregation, AGGREGATIONS)
    counted = num_tokens is not None or num_sequences is not None
    if aggregation == "micro_token_mean" and counted:
        raise ValueError(
            "num_tokens and num_sequences are not for aggregation='micro_token_mean': its "
            "micro-batches are of the rows of one array."
        )
    if micro_rows < 1:
        raise ValueError(f"micro_rows must be positive, got {micro_rows!r}.")
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
    divisor = {
        "token_mean": lambda: num_tokens,
        "seq_mean_token_mean": lambda: length_R.astype(jnp.float32) * num_sequences,
        "seq_mean_token_sum": lambda: num_sequences,
        "token_sum_constant": lambda: constant,
        "micro_token_mean": lambda: _micro_divisor(length_R, nonempty_R, micro_rows),
    }[aggregation]()
    divisor_R = jnp.where(nonempty_R, jnp.asarray(divisor, jnp.float32), 1.0)
    return jnp.where(mask, (1.0 / divisor_R)[:, None], 0.0)


def _micro_divisor(length_R, nonempty_R, micro_rows) -> jax.Array:
    """Micro-batches times the tokens of a row's own one, f32[R]; undefined for empty rows."""
    micro_R = (jnp.cumsum(nonempty_R, dtype=jnp.int32) - 1) // micro_rows
    tokens_M = jnp.zeros_like(length_R).at[micro_R].add(length_R)
    return tokens_M[micro_R].astype(jnp.float32) * (jnp.max(micro_R) + 1)


def policy_loss(
    logprobs,
    behaviour_logprobs,
    advantages,
    mask,
    *,
    weights=None,
    aggregation: str = "token_mean",
    constant=None,
    micro_rows: int = 4,
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

    The loss per token is a function of `LOSSES`, which have the formulas, or one like them, of the
    advantage A, log pi = logprobs and the ratio r = exp(clamp(log pi - log anchor)). Gradients flow
    through log pi (and `entropy`) only. At log pi = log anchor "pg", "ppo" and "tis" have exactly
    the gradient of -A log pi, also with clip bounds of 0.

    Stale samples. `behaviour_logprobs` are of the policy that sampled, and the anchor unless
    `old_logprobs` are given: those of the policy just before the update, recomputed by the trainer.
    With these the anchor is old_logprobs, and
      correction "behaviour"   multiplies a token's loss by min(exp(log old - log behaviour),
                               truncation), which also absorbs the difference between the
                               sampler's and the trainer's numerics
      correction "recompute"   counts stale data as on-policy (as SPEED released)

    The KL to `ref_logprobs` and the entropy bonus are then added per token:
    + kl_coef * kl(log pi, log ref) - entropy_coef * entropy.

    Args:
      logprobs, behaviour_logprobs: f32[R, T], of one temperature, unless `old_logprobs` are the
        anchor and nothing else is compared with the latter (correction "recompute").
      advantages: f32[R], or f32[R, T] for token-level ones; constants.
      mask: [R, T], True at the tokens that are trained on. Values elsewhere, NaN
        included, change nothing and get gradient 0.
      weights: f32[R, T] from `token_weights` on the global batch, sliced like the rest; None: from
        aggregation, constant and micro_rows, if this is the whole batch.
      loss: a name in `LOSSES`, or a `LossFn`. correction, kl_kind: static strings.
      truncation: of the correction's weights, and of "tis". log_ratio_clamp (nats)
        bounds every log-ratio before exp; beyond it the gradient is 0.
      settings: numbers of a loss given by its word, such as clip_low. Numbers of other losses in
        `LOSSES` are ignored, so that one set of settings serves all.
      ref_logprobs, entropy: f32[R, T] or None; the entropy of the policy per token, in nats.
      kl_coef, entropy_coef: numbers, or traced scalars for schedules.

    Returns:
      loss: f32 scalar, to minimise.
      metrics: dict of f32 scalars that accumulate over micro-batches (`merge_metrics`), with zeros
        as identity; `summarise_metrics` turns them into the means to log.
          "loss/..."  total, policy, kl, entropy, with weights and coefficients: policy + kl +
                      entropy = total.
          "sum/..."   sums over unmasked tokens: ratio; clip_low, clip_high, clip_dual and
                      weight_truncated (cut at that bound), 0 for a loss without it; further
                      metrics of the loss by name; correction (the weight of stale tokens, else
                      1), kl_behaviour (k3 estimate of KL(behaviour || pi)), behaviour_gap
                      (|log pi - log behaviour|, nats) and behaviour_gap_exp (its exponential),
                      kl_ref and entropy if given. Also tokens, and sequences (rows with a token).
          "max/..."   behaviour_gap.

    Raises:
      ValueError: unknown option, mismatched shapes, a coefficient without its
        input, or a bound out of range.
      TypeError: a setting of no known loss.
    """
    loss = _checked_loss(loss, {"truncation": truncation, **settings})
    _choose("correction", correction, CORRECTIONS)
    if isinstance(truncation, (int, float)) and truncation <= 0:
        raise ValueError(f"truncation must be positive, got {truncation!r}.")
    mask = jnp.asarray(mask).astype(bool)
    arrays = {
        "logprobs": logprobs,
        "behaviour_logprobs": behaviour_logprobs,
        "weights": weights,
        "old_logprobs": old_logprobs,
        "ref_logprobs": ref_logprobs,
        "entropy": entropy,
    }
    advantages = _checked_arrays(mask, advantages, arrays)
    if correction == "recompute" and old_logprobs is None:
        raise ValueError("correction='recompute' needs old_logprobs.")
    if ref_logprobs is None and not is_zero(kl_coef):
        raise ValueError("kl_coef is set but ref_logprobs is missing.")
    if entropy is None and not is_zero(entropy_coef):
        raise ValueError("entropy_coef is set but entropy is missing.")

    def masked(x):
        return jnp.where(mask, jnp.asarray(x).astype(jnp.float32), 0.0)

    def constant_of(x):
        return jax.lax.stop_gradient(masked(x))

    weights_RxT = constant_of(
        token_weights(mask, aggregation, constant, micro_rows=micro_rows)
        if weights is None
        else weights
    )
    behaviour_RxT = constant_of(behaviour_logprobs)
    anchor_RxT = behaviour_RxT if old_logprobs is None else constant_of(old_logprobs)
    tokens = Tokens(
        masked(logprobs), anchor_RxT, behaviour_RxT, constant_of(advantages), mask, log_ratio_clamp
    )

    truncated = jnp.zeros_like(mask)
    correction_RxT = jnp.ones_like(tokens.logprobs)
    if old_logprobs is not None and correction == "behaviour":
        importance_RxT = ratio_of(anchor_RxT, behaviour_RxT, log_ratio_clamp)
        truncated = importance_RxT > truncation
        correction_RxT = jnp.minimum(importance_RxT, truncation)

    policy_RxT, of_loss = call_loss(loss, tokens)
    parts = {"policy": jnp.sum(weights_RxT * correction_RxT * policy_RxT)}
    sums = _token_metrics(tokens, of_loss, truncated, correction_RxT)
    if ref_logprobs is not None:
        sums["kl_ref"] = divergences.kl(
            tokens.logprobs, constant_of(ref_logprobs), kl_kind, log_ratio_clamp
        )
        parts["kl"] = kl_coef * jnp.sum(weights_RxT * sums["kl_ref"])
    if entropy is not None:
        sums["entropy"] = masked(entropy)
        parts["entropy"] = -entropy_coef * jnp.sum(weights_RxT * sums["entropy"])
    total = sum(parts.values())

    metrics = {"loss/total": total} | {f"loss/{k}": v for k, v in parts.items()}
    metrics |= {f"sum/{name}": jnp.sum(masked(x)) for name, x in sums.items()}
    metrics["sum/sequences"] = jnp.sum(jnp.any(mask, axis=1)).astype(jnp.float32)
    metrics["max/behaviour_gap"] = jnp.max(sums["behaviour_gap"], initial=0.0)
    return total, jax.lax.stop_gradient(metrics)


def _token_metrics(
    tokens: Tokens, of_loss: dict[str, jax.Array], truncated, correction
) -> dict[str, jax.Array]:
    """Metrics to sum over tokens, [R, T] each; 0 if a loss has none."""
    nothing = jnp.zeros_like(tokens.mask)
    gap_RxT = jnp.abs(tokens.logprobs - tokens.behaviour)
    return {
        "tokens": tokens.mask,
        "ratio": tokens.ratio,
        **{name: nothing for name in ("clip_low", "clip_high", "clip_dual", "weight_truncated")},
        **of_loss,
        "weight_truncated": truncated | of_loss.get("weight_truncated", nothing),
        "correction": correction,
        "kl_behaviour": divergences.kl(
            tokens.behaviour, tokens.logprobs, "k3", tokens.log_ratio_clamp
        ),
        "behaviour_gap": gap_RxT,
        "behaviour_gap_exp": jnp.exp(jnp.minimum(gap_RxT, tokens.log_ratio_clamp)),
    }


def _checked_loss(loss: str | LossFn, settings: dict) -> LossFn:
    if isinstance(loss, str):
        _choose("loss", loss, tuple(LOSSES))
        return loss_named(loss, settings)
    if unknown := set(settings) - {"truncation"}:
        raise TypeError(f"{', '.join(sorted(unknown))}: a loss that is given has its own numbers")
    return loss


def _checked_arrays(mask, advantages, arrays) -> jax.Array:
    """The advantages as [R, 1] or [R, T]."""
    if mask.ndim != 2:
        raise ValueError(f"mask must be [R, T]; got shape {mask.shape}.")
    for name, array in arrays.items():
        if array is not None and jnp.shape(array) != mask.shape:
            raise ValueError(
                f"{name} must have the shape of mask, {mask.shape}; got {jnp.shape(array)}."
            )
    advantages = jnp.asarray(advantages)
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    if (
        advantages.ndim != 2
        or advantages.shape[0] != mask.shape[0]
        or advantages.shape[1] not in (1, mask.shape[1])
    ):
        raise ValueError(
            f"advantages must be [R] or [R, T] with [R, T] = {mask.shape}; got {advantages.shape}."
        )
    return advantages
