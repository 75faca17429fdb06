"""Log-probabilities through the chunked head against a log-softmax of all logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_speed.policy import ModelConfig, hidden_states, init, logprobs, token_logprobs
from rl_speed.policy import forward as forward_pass
from rl_speed.policy.logprobs import logits_logprobs

pytestmark = pytest.mark.usefixtures("quick_compiles")

MODEL = ModelConfig(
    vocab_size=33, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp_width=16
)
ROWS = 3
LENGTH = 10
forward = jax.jit(forward_pass, static_argnums=2)
RNG = np.random.default_rng(0)
TOKENS, TARGETS = RNG.integers(0, 33, (2, ROWS, LENGTH))
WEIGHTS = RNG.normal(size=(2, ROWS, LENGTH))


@functools.cache
def model(tied):
    config = dataclasses.replace(MODEL, tie_embeddings=tied)
    return config, jax.jit(lambda key: jax.tree.map(lambda x: x * 2, init(config, key)))(
        jax.random.key(0)
    )


def reference(params, config, temperature):
    """Straight from the definition, on all logits."""
    log_p = jax.nn.log_softmax(forward(params, TOKENS, config) / temperature, axis=-1)
    return jnp.take_along_axis(log_p, TARGETS[..., None], -1)[..., 0], -jnp.sum(
        jnp.exp(log_p) * log_p, -1
    )


@pytest.mark.parametrize("tied, temperature", [(True, 0.6), (False, 1.0)])
def test_values_and_gradients_equal_the_definition_for_every_chunk(tied, temperature):
    config, params = model(tied)

    def total(params, how):
        logprobs, entropy = how(params)
        return jnp.sum(logprobs * WEIGHTS[0]) + jnp.sum(entropy * WEIGHTS[1]), (logprobs, entropy)

    def chunked(chunk):
        return lambda p: token_logprobs(
            p,
            hidden_states(p, TOKENS, config),
            TARGETS,
            config,
            temperature=temperature,
            chunk=chunk,
            with_entropy=True,
        )

    run = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    (_, want), want_grad = run(params, lambda p: reference(p, config, temperature))
    for chunk in (3 * 4, None):  # pieces that do not divide the length, one piece
        (_, got), grad = run(params, chunked(chunk))
        for mine, theirs in zip(got, want):
            assert mine.dtype == jnp.float32 and mine.shape == (ROWS, LENGTH)
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
        # Gradients reach 170, where float32 resolves 1.5e-5.
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-4), grad, want_grad
        )


@pytest.mark.parametrize("tied", [True, False])
def test_only_needed_tokens_are_computed(tied, monkeypatch):
    """Values and gradients are those of all tokens where the others have no weight; the work is
    that of the needed ones.
    """
    config, params = model(tied)
    monkeypatch.setattr(logprobs, "SMALLEST_CHUNK", 4)
    tokens, targets = TOKENS.reshape(1, -1), TARGETS.reshape(1, -1)
    hidden = hidden_states(params, tokens, config)

    def total(params, hidden, needed, weights):
        found = token_logprobs(
            params, hidden, targets, config, temperature=0.7, with_entropy=True, needed=needed
        )
        return sum(jnp.sum(x * w) for x, w in zip(found, weights)), found

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))
    rng = np.random.default_rng(2)
    for share in (0.0, 0.3, 1.0):
        needed = rng.random((1, tokens.size)) < share
        weights = WEIGHTS.reshape(2, 1, -1) * needed
        (_, want), want_grad = run(params, hidden, None, weights)
        (_, got), grad = run(params, hidden, needed, weights)
        for mine, theirs in zip(got, want):
            np.testing.assert_allclose(mine, np.where(needed, theirs, 0), atol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-4), grad, want_grad
        )

    def loops(needed):
        """Loops whose number of rounds the program computes; a scan has a fixed one."""
        traced = jax.make_jaxpr(lambda needed: total(params, hidden, needed, weights)[0])
        return str(traced(needed)).count("while[")

    assert (loops(None), loops(needed)) == (0, 1)


@pytest.mark.parametrize("offset", [0.0, 40.0, -200.0])
def test_precision_does_not_depend_on_the_size_of_the_logits(offset):
    logits = (offset + 5 * np.random.default_rng(0).normal(size=(50, 300))).astype(np.float32)
    targets = np.random.default_rng(1).integers(0, 300, 50)
    exact = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    logprobs, entropy = logits_logprobs(
        jnp.asarray(logits), jnp.asarray(targets), with_entropy=True
    )
    np.testing.assert_allclose(
        logprobs, np.take_along_axis(exact, targets[:, None], -1)[:, 0], rtol=1e-6, atol=2e-6
    )
    np.testing.assert_allclose(entropy, -(np.exp(exact) * exact).sum(-1), atol=2e-6)


def test_entropy_is_left_out_unless_asked_for():
    config, params = model(True)
    hidden = jax.jit(hidden_states, static_argnums=2)(params, TOKENS, config)
    for chunk in (None, 6):
        logprobs, entropy = token_logprobs(params, hidden, TARGETS, config, chunk=chunk)
        assert entropy is None
        np.testing.assert_allclose(logprobs, reference(params, config, 1.0)[0], atol=1e-5)


def test_entropy_has_its_known_extremes():
    logprobs, entropy = logits_logprobs(
        jnp.array([[0.0] * 8, [1e4] + [0.0] * 7]), jnp.array([3, 0]), with_entropy=True
    )
    np.testing.assert_allclose(entropy, [np.log(8), 0], atol=1e-6)
    np.testing.assert_allclose(logprobs, [-np.log(8), 0], atol=1e-6)


def test_temperature_may_be_traced():
    config, params = model(True)
    hidden = jax.jit(hidden_states, static_argnums=2)(params, TOKENS, config)
    at = jax.jit(
        lambda t: token_logprobs(params, hidden, TARGETS, config, temperature=t, chunk=6)[0]
    )
    np.testing.assert_allclose(at(0.6), reference(params, config, 0.6)[0], atol=1e-5)


def test_chunks_keep_the_logits_of_the_whole_batch_out_of_memory():
    config = dataclasses.replace(MODEL, vocab_size=4000, width=8)
    params = jax.jit(init, static_argnums=0)(config, jax.random.key(0))
    hidden = jnp.ones((4, 64, 8))
    targets = jnp.zeros((4, 64), jnp.int32)

    def loss(p, h, chunk):
        return token_logprobs(p, h, targets, config, chunk=chunk)[0].sum()

    def needs(chunk):
        return (
            jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
            .lower(params, hidden, chunk)
            .compile()
            .memory_analysis()
            .temp_size_in_bytes
        )

    logits_bytes = 4 * 64 * 4000 * 4
    assert needs(None) >= logits_bytes and needs(16) < logits_bytes / 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(temperature=0), "temperature must be above 0"),
        (dict(temperature=-1.0), "temperature must be above 0"),
        (dict(chunk=0), "chunk must be at least 1 token"),
    ],
)
def test_impossible_settings_are_named(arguments, message):
    config, params = model(True)
    with pytest.raises(ValueError, match=message):
        token_logprobs(
            params, jnp.zeros((1, 2, 16)), jnp.zeros((1, 2), jnp.int32), config, **arguments
        )
