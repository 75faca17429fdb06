"""Overlong penalty and KL in the reward against hand-written loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_speed.objectives import kl_shaped_rewards, overlong_penalty

pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_overlong_penalty_is_the_formula(factor):
    lengths = np.arange(0, 30)
    expected = [min(-(n - (20 - 8)) / 8, 0) * factor for n in lengths]
    got = overlong_penalty(lengths, 20, 8, factor)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert got.dtype == jnp.float32 and got[12] == 0 and got[20] == -factor


def test_overlong_penalty_jits_and_checks_its_buffer():
    lengths = np.arange(30, dtype=np.int32)
    jitted = jax.jit(overlong_penalty, static_argnames=("max_length", "buffer"))
    np.testing.assert_allclose(jitted(lengths, 20, 20), overlong_penalty(lengths, 20, 20))
    for buffer in (0, 21, -1):
        with pytest.raises(ValueError, match="buffer"):
            overlong_penalty(lengths, 20, buffer)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_kl_shaped_rewards_sum_over_the_masked_tokens(kind):
    rng = np.random.default_rng(0)
    logp, ref = rng.normal(-1, 0.4, (2, 5, 6)).astype(np.float32)
    mask = rng.random((5, 6)) < 0.6
    mask[2] = False
    rewards = rng.normal(size=5).astype(np.float32)
    forms = {"k1": lambda d: d, "k2": lambda d: d * d / 2, "k3": lambda d: np.exp(-d) + d - 1}
    expected = [
        rewards[i] - 0.3 * sum(forms[kind](logp[i, t] - ref[i, t]) for t in range(6) if mask[i, t])
        for i in range(5)
    ]
    holes = [np.where(mask, x, bad) for x, bad in ((logp, np.nan), (ref, -np.inf))]
    got = kl_shaped_rewards(rewards, *holes, mask, 0.3, kind)
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert got[2] == rewards[2]
    grad = jax.grad(lambda x: jnp.sum(kl_shaped_rewards(rewards, x, ref, mask, 0.3, kind)))
    assert np.all(np.asarray(grad(jnp.asarray(logp))) == 0)
