"""The policy loss of a batch: a weighted sum over tokens, which micro-batches and shards add up to.

Every loss here is sum(weights * per_token). `token_weights` computes the weights once on the global
batch; they contain all divisors of the means. Micro-batches and shards use slices of them, so their
losses and gradients add up to those of the batch, and so do their metrics.
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
    """Computes weights f32[R, T] such that loss = sum(weights * per_token).

      token_mean            1 / tokens of the batch (DAPO)
      seq_mean_token_mean   1 / (sequences * tokens of the row) (GRPO)
      seq_mean_token_sum    1 / sequences
      token_sum_constant    1 / constant (Dr. GRPO, as released: rows * max_response_length)
      micro_token_mean      1 / (micro-batches * tokens of the micro-batch) (verl's "token-mean",
                            which it computes for each micro-batch)

    A micro-batch of "micro_token_mean" is `micro_rows` successive rows of the batch, without rows
    that have no trained token; the last one may be smaller. It defines the loss, not how the loss
    is computed. Only for this aggregation does the order of the rows matter.

    Args:
      mask: [R, T], True at the trained tokens of the *global* batch. Rows without such tokens get
        weight 0 and do not count as sequences.
      constant: divisor for token_sum_constant, and only for it.
      micro_rows: rows of a micro-batch.
      lengths: [R], tokens of each row to divide by, instead of its unmasked ones, such as prefix +
        suffix if the prefix is masked (RPO).
      num_tokens, num_sequences: counts of the global batch to divide by, instead of those of
        `mask`, if the batch is in several arrays. Not for micro_token_mean.

    Returns: f32[R, T], exactly 0 where mask is False; all 0 for an empty batch.

    Raises:
      ValueError: the aggregation is unknown; the constant is missing, not allowed or not positive;
        or micro_rows is not positive.

    Source: token means: DAPO (arXiv 2503.14476), section 3.3; means of samples: DeepSeekMath (arXiv
    2402.03300); a constant: Dr. GRPO (arXiv 2503.20783).
    """
    _choose("aggregation", aggregation, AGGREGATIONS)
    counted = num_tokens is not None or num_sequences is not None
    if aggregation == "micro_token_mean" and counted:
        raise ValueError(
            "num_tokens and num_sequences are not for aggregation='micro_token_mean', whose "
            "micro-batches are rows of one array: pass the whole batch, and leave both at None."
        )
    if micro_rows < 1:
        raise ValueError(f"micro_rows must be positive, got {micro_rows!r}.")
    if (aggregation == "token_sum_constant") != (constant is not None):
        raise ValueError(
            "aggregation='token_sum_constant' needs a constant, and other aggregations need "
            f"constant=None; got aggregation={aggregation!r}, constant={constant!r}. Dr. GRPO uses "
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
    """Micro-batches * tokens of the row's micro-batch, f32[R]; undefined for empty rows."""
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
    """Computes the policy-gradient loss on sampled tokens, and its metrics.

    `loss` computes the loss of each token (formulas in losses.py) from the advantage A, log pi =
    logprobs and the ratio r = exp(clamp(log pi - log anchor)). Gradients flow only through log pi
    and `entropy`. At log pi = log anchor, "pg", "ppo" and "tis" have exactly the gradient of
    -A log pi, also with clip bounds of 0.

    Stale samples: `behaviour_logprobs` are those of the policy that sampled. They are the anchor,
    unless `old_logprobs` are given: log-probs under the policy just before the update, recomputed
    by the trainer. Then old_logprobs are the anchor, and
      correction "behaviour"   multiplies the loss of a token by min(exp(log old - log behaviour),
                               truncation), which also corrects differences between the numerics
                               of sampler and trainer
      correction "recompute"   counts stale data as on-policy (as in SPEED's released code)

    The KL to `ref_logprobs` and the entropy bonus are then added per token:
    + kl_coef * kl(log pi, log ref) - entropy_coef * entropy.

    Args:
      logprobs, behaviour_logprobs: f32[R, T], of one temperature; with correction "recompute",
        behaviour_logprobs may have another, if the loss does not use them: only metrics then mix
        the two.
      advantages: f32[R], or f32[R, T] per token; no gradient flows through them.
      mask: [R, T], True at the trained tokens. Values elsewhere, also NaN, change nothing and get
        gradient 0.
      weights: f32[R, T] from `token_weights` on the global batch, sliced like the other arrays;
        None: computed from aggregation, constant and micro_rows, if this is the whole batch.
      loss: a name in `LOSSES`, or a `LossFn`. correction, kl_kind: static strings.
      truncation: largest weight of the correction, and of "tis". log_ratio_clamp: in nats, bounds
        every log-ratio before exp; beyond it the gradient is 0.
      settings: numbers of a loss given by its word, such as clip_low. Numbers of other losses in
        `LOSSES` are ignored.
      ref_logprobs: f32[R, T] or None. entropy: f32[R, T] or None, of the policy at each token, in
        nats.
      kl_coef, entropy_coef: numbers, or traced scalars for schedules.

    Returns:
      loss: f32 scalar, to minimise.
      metrics: dict of f32 scalars to accumulate over micro-batches with `merge_metrics`; zeros are
        the identity. `summarise_metrics` turns them into the means to log.
          "loss/..."  total, policy, kl and entropy, with weights and coefficients; total = policy +
                      kl + entropy.
          "sum/..."   sums over unmasked tokens: ratio; clip_low, clip_high, clip_dual and
                      weight_truncated (1 where that bound applies, 0 for a loss without it); other
                      metrics of the loss by name; correction (the weight of stale tokens, else
                      1); kl_behaviour (k3 estimate of KL(behaviour || pi)); behaviour_gap
                      (|log pi - log behaviour|, nats) and behaviour_gap_exp (its exponential);
                      kl_ref and entropy if given. Also tokens, and sequences (rows with a token).
          "max/..."   behaviour_gap.

    Raises:
      ValueError: an option is unknown, shapes do not fit, a coefficient has no input, or a bound is
        out of range.
      TypeError: a setting belongs to no known loss.
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
        raise ValueError("correction='recompute' needs old_logprobs, which are None.")
    if ref_logprobs is None and not is_zero(kl_coef):
        raise ValueError("kl_coef is set, so ref_logprobs is needed; it is None.")
    if entropy is None and not is_zero(entropy_coef):
        raise ValueError("entropy_coef is set, so entropy is needed; it is None.")

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
    """Metrics to sum over tokens, [R, T] each; 0 for those that the loss does not return."""
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
        raise TypeError(
            f"{', '.join(sorted(unknown))}: not allowed when `loss` is an object; set its numbers "
            "when you make it, or give the loss by its word"
        )
    return loss


def _checked_arrays(mask, advantages, arrays) -> jax.Array:
    """Checks shapes, and returns the advantages as [R, 1] or [R, T]."""
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


def merge_metrics(first, *others):
    """Combines `policy_loss` metrics of micro-batches: "max/" entries by maximum, others by sum.

    Associative; all-zero metrics are the identity. Raises ValueError if the names differ.
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


def reduce_metrics(metrics, axes):
    """Combines metrics like `merge_metrics`, over all devices along mesh axes, inside
    `jax.shard_map`.
    """
    return {
        name: (jax.lax.pmax if name.startswith("max/") else jax.lax.psum)(value, axes)
        for name, value in metrics.items()
    }


def summarise_metrics(metrics):
    """Turns accumulated `policy_loss` metrics into the scalars to log.

    Returns: loss, loss_policy, loss_kl and loss_entropy as accumulated; the counts tokens and
    sequences; `<name>_max`; and every other "sum/" entry as its mean per unmasked token (0 without
    tokens).
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
