"""Supervised training: loss on the solution only, independent of padding and micro-batches, and it learns."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_speed.mesh import batch_sharding, make_mesh
from rl_speed.policy import ModelConfig, forward, init
from rl_speed.training import sft
from rl_speed.training.optimizer import OptimizerConfig, make_optimizer
from rl_speed.training.sft import Example, SFTConfig

pytestmark = pytest.mark.usefixtures("quick_compiles")

MODEL = ModelConfig(vocab_size=11, width=16, layers=2, heads=2, kv_heads=1, head_dim=8, mlp_width=24, max_position=32)


def examples(count, seed=0, low=1):
    rng = np.random.default_rng(seed)
    draw = lambda: rng.integers(low, 11, rng.integers(1, 5)).astype(np.int32)
    return [Example(draw(), draw()) for _ in range(count)]


@pytest.fixture(scope="module")
def params():
    return init(MODEL, jax.random.key(0))


@pytest.fixture(scope="module")
def loss():
    return jax.jit(lambda params, batch: sft.loss_sum(params, batch, MODEL))


def by_hand(params, items):
    """Row by row without padding, from logits: -log softmax at each response token, given all before it."""
    total = 0.0
    for item in items:
        tokens = np.concatenate([item.prompt, item.response])
        logprobs = jax.nn.log_softmax(forward(params, jnp.asarray(tokens)[None], MODEL)[0])
        total -= sum(float(logprobs[t - 1, tokens[t]]) for t in range(len(item.prompt), len(tokens)))
    return total


def test_loss_is_that_of_the_solution_alone(params, loss):
    # low=0: the padding id occurs as a real token, which a mask made from `token != pad` would lose.
    items = examples(3, low=0)
    np.testing.assert_allclose(loss(params, sft.build_batch(items, 12)), by_hand(params, items), rtol=1e-5)


def test_padding_changes_nothing(params, loss):
    items = examples(6)
    np.testing.assert_allclose(loss(params, sft.build_batch(items, 8)), loss(params, sft.build_batch(items, 12)), rtol=1e-6)


def run_once(params, batch, micro_batches):
    optimizer = optax.sgd(1.0)  # the update is then the gradient itself
    copy = jax.tree.map(jnp.copy, params)
    new, _, metrics = sft.make_update(MODEL, optimizer, micro_batches)(copy, optimizer.init(copy), batch)
    return jax.tree.map(jnp.subtract, params, new), metrics


def test_gradients_do_not_depend_on_micro_batches_or_devices(params):
    batch = sft.build_batch(examples(8), 8)
    count = sum(len(e.response) for e in examples(8))
    loss, gradient = jax.jit(jax.value_and_grad(lambda p: sft.loss_sum(p, batch, MODEL) / count))(params)
    spread = jax.device_put(batch, batch_sharding(make_mesh(data=2, fsdp=2)))
    for placed, micro_batches in ((batch, 4), (spread, 2)):
        change, metrics = run_once(params, placed, micro_batches)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), change, gradient)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
        assert int(metrics["tokens"]) == count


def test_micro_batches_must_divide_the_batch(params):
    with pytest.raises(ValueError, match="8 rows cannot be split into 3"):
        run_once(params, sft.build_batch(examples(8), 8), 3)


def test_training_learns_a_mapping_and_reports_the_held_out_loss(params):
    # The response repeats the prompt's last token, then ends with 0.
    items = [Example(np.array([a, b], np.int32), np.array([b, 0], np.int32)) for a in range(1, 11) for b in range(1, 11)]
    batch = sft.build_batch(items, 4)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=5, weight_decay=0), params)
    seen = []
    new = sft.train(jax.tree.map(jnp.copy, params), MODEL, optimizer, itertools.repeat(batch), [batch],
                    SFTConfig(steps=60, eval_every=30), seen.append)
    assert [m["step"] for m in seen] == list(range(1, 61))
    assert [m["step"] for m in seen if "eval_loss" in m] == [30, 60]
    assert seen[-1]["eval_loss"] < 0.2 < 1.0 < seen[0]["loss"]
    np.testing.assert_allclose(sft.make_evaluate(MODEL)(new, [batch, batch]), seen[-1]["eval_loss"], rtol=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(params):
    broken = jax.tree.map(lambda x: x * jnp.nan, params)
    optimizer = make_optimizer(OptimizerConfig(), params)
    with pytest.raises(FloatingPointError, match="step 1: loss nan"):
        sft.train(broken, MODEL, optimizer, itertools.repeat(sft.build_batch(examples(4), 8)), [], SFTConfig(steps=3),
                  lambda metrics: None)


def test_epochs_show_every_example_once_in_a_new_order():
    items = examples(10)
    batches = sft.shuffled_epochs(items, 4, seed=1)
    drawn = [items.index(e) for _ in range(5) for e in next(batches)]
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10)) and drawn[:10] != drawn[10:]
    again = sft.shuffled_epochs(items, 4, seed=1)
    assert drawn == [items.index(e) for _ in range(5) for e in next(again)]


def test_what_is_too_long_is_dropped_and_counted_never_cut():
    items = examples(20)
    kept, dropped = sft.keep_short(items, 5)
    assert dropped == sum(len(e) > 5 for e in items) > 0 and len(kept) + dropped == 20
    with pytest.raises(ValueError, match="max_length = 1"):
        sft.keep_short(items, 1)
    with pytest.raises(ValueError, match="does not fit into 5"):
        sft.build_batch([e for e in items if len(e) > 5][:1], 5)
