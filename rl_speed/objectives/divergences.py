"""KL estimators per token, from the log-probs of sampled tokens."""

import jax.numpy as jnp

KL_KINDS = ("k1", "k2", "k3")


def kl(logprobs, ref_logprobs, kind: str = "k3", clamp: float = 20.0):
    """Estimates KL(pi || ref) of each token; the tokens must be sampled from pi.

    With d = log pi - log ref (Schulman, "Approximating KL
    divergence"):
      k1 = d               unbiased, any sign, high variance
      k2 = d^2 / 2         biased in value, lower variance
      k3 = e^-d + d - 1    unbiased and never negative

    In the *reward* (`shaping.kl_shaped_rewards`) k1 gives the exact gradient of KL(pi || ref). In
    the *loss* k1 has expected gradient zero (useless as a penalty), k2 has exactly the gradient of
    KL(pi || ref), and k3, GRPO's choice, that of KL(ref || pi).

    Both log-probs and the result have one shape, any; gradients flow through both log-probs.
    `clamp`, in nats, bounds d of k3 from below, so that a token on which the policies disagree
    cannot overflow. Raises ValueError for an unknown kind.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"Unknown KL kind {kind!r}; choose one of {KL_KINDS}.")
    d = jnp.asarray(logprobs, jnp.float32) - jnp.asarray(ref_logprobs, jnp.float32)
    if kind == "k1":
        return d
    if kind == "k2":
        return 0.5 * jnp.square(d)
    # Near d = 0, where training starts, e^-d + d - 1 is about d^2/2, and computed directly in
    # float32 it is noise below d = 1e-3. The series is exact to rounding for |d| < 0.1.
    small = jnp.abs(d) < 0.1
    x = jnp.where(small, d, 0.0)
    series = jnp.square(x) * (1 / 2 - x * (1 / 6 - x * (1 / 24 - x * (1 / 120 - x * (1 / 720)))))
    # Bounds d in both terms. If only the exponent were bounded, the gradient of +d would push a
    # log-prob that is already too low further down.
    y = jnp.where(small, 1.0, jnp.maximum(d, -clamp))
    return jnp.where(small, series, jnp.expm1(-y) + y)
