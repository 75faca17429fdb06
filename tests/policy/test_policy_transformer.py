"""The forward pass: invariances, meshes, declared weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_speed.mesh import GENERATE_RULES, TRAIN_RULES, make_mesh
from rl_speed.policy import (
    ModelConfig,
    abstract_params,
    hidden_states,
    init,
    num_params,
    param_shardings,
    weights,
)
from rl_speed.policy import forward as forward_pass

pytestmark = pytest.mark.usefixtures("quick_compiles")

# Two query heads a key/value head, and a head_dim that is not width / heads.
MODEL = ModelConfig(
    vocab_size=40, width=24, layers=2, heads=4, kv_heads=2, head_dim=8, mlp_width=40, rope_theta=1e6
)
TOKENS = np.random.default_rng(0).integers(0, 40, (4, 12))
forward = jax.jit(forward_pass, static_argnums=2)


@pytest.fixture(scope="module")
def params():
    def make():
        keys = iter(jax.random.split(jax.random.key(1), 100))
        return jax.tree.map(
            lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape),
            init(MODEL, jax.random.key(0)),
        )

    return jax.jit(make)()


def test_later_tokens_and_padding_change_nothing_before_them(params):
    base = forward(params, TOKENS, MODEL)
    changed = forward(params, np.where(np.arange(12) < 7, TOKENS, 39 - TOKENS), MODEL)
    np.testing.assert_array_equal(base[:, :7], changed[:, :7])
    assert np.abs(base[:, 7:] - changed[:, 7:]).max() > 1e-2


def test_segments_of_any_number_and_padding_equal_rows_of_their_own(params):
    packed = np.array([[1] * 4 + [2] * 3 + [3] * 4 + [0]])
    out = forward(params, TOKENS[:1], MODEL, segment_ids=packed)
    for first, last in ((0, 4), (4, 7), (7, 11)):
        np.testing.assert_allclose(
            out[:, first:last], forward(params, TOKENS[:1, first:last], MODEL), atol=1e-5
        )


def test_attention_sees_relative_positions_alone(params):
    shifted = forward(params, TOKENS, MODEL, positions=np.arange(12)[None] + 100)
    np.testing.assert_allclose(shifted, forward(params, TOKENS, MODEL), atol=1e-3)
    stretched = forward(params, TOKENS, MODEL, positions=np.arange(12)[None] * 3)
    assert np.abs(stretched - shifted).max() > 1e-2


def test_remat_changes_neither_value_nor_gradient(params):
    """Layers that keep products do not compute them again: no gradient needs the seventh."""

    def loss(params, config):
        return jnp.mean(jnp.square(hidden_states(params, TOKENS, config)) * jnp.arange(24))

    products = {}
    plain = None
    for remat in (False, True, "products"):
        config = dataclasses.replace(MODEL, remat=remat)
        gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        products[remat] = str(gradient.trace(params, config).jaxpr).count("dot_general")
        found = gradient(params, config)
        plain = plain or found
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5), plain, found
        )
    assert products[False] < products["products"] == products[True] - 6


def test_bfloat16_activations_keep_float32_logits_near(params):
    half = dataclasses.replace(MODEL, dtype="bfloat16")
    assert hidden_states(params, TOKENS, half).dtype == jnp.bfloat16
    out = forward(params, TOKENS, half)
    assert out.dtype == jnp.float32
    exact = forward(params, TOKENS, MODEL)
    assert 1e-4 < np.abs(out - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("rules", [TRAIN_RULES, GENERATE_RULES])
def test_sharded_weights_give_the_same_logits(params, rules):
    mesh = make_mesh(fsdp=2, tensor=2)
    placed = jax.device_put(params, param_shardings(MODEL, mesh, rules))
    assert placed["layers"]["w_up"].sharding.spec[2] == "tensor"
    np.testing.assert_allclose(
        forward(placed, TOKENS, MODEL), forward(params, TOKENS, MODEL), atol=1e-4
    )


@pytest.mark.parametrize("tied", [True, False])
def test_the_declaration_is_what_init_makes(tied):
    config = dataclasses.replace(
        MODEL, tie_embeddings=tied, qk_norm=tied, qkv_bias=not tied, width=64, mlp_width=128
    )
    made = jax.jit(init, static_argnums=0)(config, jax.random.key(0))
    declared = weights(config)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_params(config)
    )
    assert num_params(config) == sum(x.size for x in jax.tree.leaves(made))
    assert (
        ("lm_head" in made) == (not tied)
        and ("q_norm" in made["layers"]) == tied
        and ("bq" in made["layers"]) == (not tied)
    )

    def check(weight, value):
        if weight.scale is None or weight.scale == 0:
            assert (np.asarray(value) == (1 if weight.scale is None else 0)).all()
        else:
            assert (
                abs(float(value.std()) / weight.scale - 1) < 0.1
                and abs(float(value.mean())) < 0.1 * weight.scale
            )

    jax.tree.map(check, declared, made)
