"""Rows of any length in pieces of one size: plan, pieces, attention over a window, cost."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_speed import objectives
from rl_speed.config import Objective
from rl_speed.mesh import make_mesh
from rl_speed.objectives.batch_loss import AGGREGATIONS
from rl_speed.policy import ModelConfig, init, sequence_logprobs
from rl_speed.policy.packed import banded_attention, make_windows, stream_attention
from rl_speed.policy.transformer import dense_attention
from rl_speed.sampling import Batch
from rl_speed.update.ragged import PieceShape, RowAssignment, assign_rows, make_plan, piece_of
from rl_speed.update.state import init_state, state_shardings
from rl_speed.update.step import UpdateConfig, gradients, make_update, row_lengths

pytestmark = pytest.mark.usefixtures("quick_compiles")

MODEL = ModelConfig(
    vocab_size=12, width=16, layers=2, heads=4, kv_heads=2, head_dim=4, mlp_width=32
)


def lengths_of(seed, rows, width):
    lengths = np.random.default_rng(seed).geometric(4 / width, rows).clip(2, width)
    lengths[::7] = 0  # padding rows
    return lengths.astype(np.int32)


@pytest.mark.parametrize("longest", [3, 26, 63, 64, 100, 128, 200, 320, 1100, 4096])
def test_windows_rise_to_the_longest_row_and_their_blocks_divide_the_last(longest):
    windows = make_windows(longest)
    sizes = [window.size for window in windows]
    assert longest <= sizes[-1] <= 1.25 * max(longest, 8) and sizes[0] <= 128
    assert all(4 * a <= 3 * b <= 4.5 * a for a, b in zip(sizes, sizes[1:]))
    assert all(windows[-1].block % w.block == 0 == w.size % w.block for w in windows)


@pytest.mark.parametrize(
    "rows, width, micro", [(40, 30, 64), (40, 30, 0), (7, 200, 250), (64, 9, 9)]
)
def test_every_row_is_in_one_piece_whole(rows, width, micro):
    shape = PieceShape.of(rows, width, micro)
    lengths = lengths_of(rows, rows, width)
    tokens = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    plan = jax.jit(make_plan, static_argnums=1)(lengths, shape)
    pieces = jax.jit(piece_of, static_argnums=3)
    seen = {}
    total = 0
    for number in range(int(plan.count)):
        piece = pieces(plan, tokens, number, shape)
        longest = 0
        for place in np.flatnonzero(piece.used):
            row = int(piece.row[place])
            mine = np.asarray(piece.segment) == place
            assert row not in seen and mine.sum() == lengths[row]
            np.testing.assert_array_equal(
                np.asarray(piece.tokens)[mine], tokens[row, : lengths[row]]
            )
            np.testing.assert_array_equal(np.asarray(piece.position)[mine], np.arange(lengths[row]))
            assert np.flatnonzero(mine)[0] == piece.offset[place]
            seen[row] = number
            longest = max(longest, lengths[row])
        windows = [window.size for window in shape.windows]
        assert windows[int(piece.which)] >= longest
        assert int(piece.which) == 0 or windows[int(piece.which) - 1] < longest
        total += int((np.asarray(piece.segment) >= 0).sum())
    assert set(seen) == set(np.flatnonzero(lengths)) and total == lengths.sum()
    assert not pieces(plan, tokens, int(plan.count), shape).used.any()


@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize("kind", ["geometric", "one is long", "in order", "none"])
def test_rows_are_dealt_so_that_shards_have_as_many_tokens(shards, kind):
    lengths = lengths_of(3, 64, 200)
    if kind == "in order":
        lengths = np.sort(lengths)
    if kind == "one is long":
        lengths = np.where(np.arange(64) == 5, 200, 3)
    if kind == "none":
        lengths = np.zeros(64, np.int32)
    dealt = np.asarray(assign_rows(jnp.asarray(lengths, jnp.int32), shards))
    assert sorted(dealt.reshape(-1)) == list(range(64)) and dealt.shape == (shards, 64 // shards)
    sums = lengths[dealt].sum(1)
    assert sums.max() - sums.min() <= lengths.max()
    if kind == "in order":  # as they stand, the last shard has nearly all
        assert lengths.reshape(shards, -1).sum(1).max() > 1.5 * sums.max()


def test_what_is_dealt_comes_back():
    lengths = jnp.asarray(lengths_of(3, 16, 30))
    tokens = jnp.arange(16 * 30, dtype=jnp.int32).reshape(16, 30)

    dealt = RowAssignment(lengths, 4)
    split = dealt.split(tokens)
    joined = dealt.join(split)
    np.testing.assert_array_equal(joined, tokens)
    np.testing.assert_array_equal(split, tokens[assign_rows(lengths, 4)])


@pytest.mark.parametrize("which", [0, 1, 2, 6])
def test_a_window_sees_what_dense_attention_sees(which):
    windows = make_windows(600)
    window = windows[which]
    config = dataclasses.replace(MODEL, head_dim=8)
    rng = np.random.default_rng(0)
    length = 3 * windows[-1].block
    q, k, v = (jnp.asarray(rng.normal(size=(2, length, n, 8)), jnp.float32) for n in (4, 2, 2))
    ends = np.cumsum(rng.integers(1, window.size + 1, (2, length)), axis=1)
    segments = jnp.asarray([np.searchsorted(row, np.arange(length), side="right") for row in ends])

    def summed(attend):
        return jax.value_and_grad(lambda qkv: jnp.sum(jnp.sin(attend(*qkv))))((q, k, v))

    want, want_grads = summed(lambda *qkv: dense_attention(*qkv, segments, config))
    for attend in (
        lambda *qkv: banded_attention(*qkv, segments, window, config),
        lambda *qkv: stream_attention(*qkv, segments, None, jnp.int32(which), windows, config),
    ):
        got, grads = summed(attend)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        for a, b in zip(grads, want_grads, strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def documented_cudnn(q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type):
    """What JAX says of its kernel; values and gradients outside of sequences are not written."""
    assert mask_type.name == "PADDING_CAUSAL" and scale == q.shape[-1] ** -0.5
    segments = np.full(q.shape[:2], -1)
    for row, counts in enumerate(np.asarray(q_seqlen)):
        for place, count in enumerate(counts):
            if count >= 0:
                at = int(q_offsets[row, place])
                assert at + count == q_offsets[row, place + 1] and count == kv_seqlen[row, place]
                segments[row, at : at + count] = place
    held = (segments >= 0)[..., None, None]
    dense = functools.partial(dense_attention, segment_ids=segments, config=MODEL)

    @jax.custom_vjp
    def attend(q, k, v):
        return jnp.where(held, dense(q, k, v), jnp.nan)

    def backward(saved, of_out):
        gradients = jax.vjp(dense, *saved)[1](jnp.where(held, of_out, 0))
        return tuple(jnp.where(held, x, jnp.nan) for x in gradients)

    attend.defvjp(lambda *qkv: (attend(*qkv), qkv), backward)
    return attend(q, k, v)


@pytest.mark.parametrize("lengths", [(40, 17, 1), (64,), (60, 0), (9, 9, 9, 9)])
def test_cudnn_gets_the_sequences_of_a_piece(lengths, monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", documented_cudnn)
    gpu = dataclasses.replace(MODEL, platform="gpu", dtype="bfloat16", head_dim=8)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 64, n, 8)), jnp.float32) for n in (4, 2, 2))
    count = sum(lengths)
    segments = np.full((1, 64), -1)
    segments[0, :count] = np.repeat(np.arange(len(lengths)), lengths)
    rows = jnp.asarray([lengths], jnp.int32)

    def summed(attend):
        return jax.value_and_grad(lambda qkv: jnp.sum(jnp.sin(attend(*qkv)[:, :count])))((q, k, v))

    got = summed(lambda *qkv: stream_attention(*qkv, segments, rows, None, (), gpu))
    want = summed(lambda *qkv: dense_attention(*qkv, segments, MODEL))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, want)


def test_without_that_kernel_attention_is_banded_and_says_so(monkeypatch, caplog):
    from jax._src.cudnn import fused_attention_stablehlo

    def refuse(*_, **__):
        raise NotImplementedError("Packed layout requires a GPU with at least Hopper architecture.")

    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", refuse)
    gpu = dataclasses.replace(MODEL, platform="gpu", dtype="bfloat16", head_dim=8)
    windows = make_windows(64, "cudnn")
    length = windows[-1].block
    q, k, v = (jnp.ones((1, length, n, 8)) for n in (4, 2, 2))
    segments = jnp.zeros((1, length), jnp.int32)
    # The banded form calls cuDNN, too, which is not on a machine without a GPU.
    with pytest.raises((NotImplementedError, RuntimeError)):
        stream_attention(q, k, v, segments, jnp.full((1, 1), length), jnp.int32(0), windows, gpu)
    assert "reads whole windows" in caplog.text


def ragged_batch(rows=24, width=90, seed=0):
    rng = np.random.default_rng(seed)
    at = np.arange(width)
    lengths = lengths_of(seed, rows, width)[:, None]
    tokens = np.where(at < lengths, rng.integers(0, 12, (rows, width)), 0).astype(np.int32)
    mask = ((at >= 2) & (at < lengths))[:, 1:]
    mask[1] = False
    batch = Batch(
        tokens=tokens,
        mask=mask,
        behaviour_logprobs=np.where(mask, -rng.exponential(size=mask.shape), 0).astype(np.float32),
        rewards=rng.integers(0, 2, rows).astype(np.float32),
        group_ids=np.where(mask.any(1), np.arange(rows) // 6, -1).astype(np.int32),
    )
    return jax.tree.map(jnp.asarray, batch), jnp.asarray(rng.normal(size=rows), jnp.float32)


@pytest.fixture(scope="module")
def params():
    return jax.jit(init, static_argnums=0)(MODEL, jax.random.key(0))


# Every loss, and every aggregation under one of them.
FORMS = [(loss, "token_mean") for loss in objectives.LOSSES]
FORMS += [("ppo", aggregation) for aggregation in AGGREGATIONS if aggregation != "token_mean"]


@pytest.mark.parametrize("loss, aggregation", FORMS)
def test_gradients_are_those_of_padded_rows(params, loss, aggregation):
    """Several windows, several pieces, rows without a token to train on."""
    batch, advantages = ragged_batch(width=140)
    objective = Objective(
        loss=objectives.LOSSES[loss](), aggregation=aggregation, aggregation_constant=7.0
    )
    config = UpdateConfig(groups=4, micro_tokens=200, objective=objective)
    assert len(config.pieces(batch.tokens, make_mesh(), MODEL).windows) == 3
    got, metrics = jax.jit(
        lambda p: gradients(p, batch, advantages, None, None, MODEL, config, make_mesh())
    )(params)

    trained = batch.mask.any(axis=1).sum()
    constant = 7.0 * trained if aggregation == "token_sum_constant" else None
    weights = objectives.token_weights(batch.mask, aggregation, constant)

    def padded(p):
        logprobs, entropy = sequence_logprobs(p, batch.tokens, MODEL, with_entropy=True)
        return objectives.policy_loss(
            logprobs,
            batch.behaviour_logprobs,
            advantages,
            batch.mask,
            loss=loss,
            weights=weights,
            entropy=entropy,
        )

    (_, want_metrics), want = jax.jit(jax.value_and_grad(padded, has_aux=True))(params)
    apart, size = (optax.tree.norm(x) for x in (jax.tree.map(jnp.subtract, got, want), want))
    assert apart <= 1e-5 * size
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, atol=1e-6)
    assert metrics["sum/held"] == row_lengths(batch.mask).sum() < metrics["sum/computed"]


@pytest.mark.parametrize("axes", [dict(data=2), dict(fsdp=2, tensor=2)], ids=str)
@pytest.mark.parametrize(
    "loss, aggregation",
    [
        pytest.param(*form, marks=[pytest.mark.slow] * (form != ("ppo", "token_mean")))
        for form in FORMS
    ],
)
def test_updates_on_a_mesh_are_those_of_one_device(params, loss, aggregation, axes):
    batch, advantages = ragged_batch(width=200)
    objective = Objective(
        loss=objectives.LOSSES[loss](), aggregation=aggregation, aggregation_constant=7.0
    )
    optimizer = optax.sgd(1.0)
    config = UpdateConfig(groups=4, micro_tokens=300, objective=objective)
    assert len(config.pieces(batch.tokens, make_mesh(), MODEL).windows) == 3

    def moved(mesh):
        state = init_state(params, optimizer, state_shardings(MODEL, optimizer, mesh))
        state, metrics = make_update(MODEL, optimizer, mesh, config)(
            state, batch, advantages, None, None
        )
        return jax.tree.map(jnp.subtract, params, jax.device_get(state.params)), metrics

    (one, metrics), (many, more) = moved(make_mesh()), moved(make_mesh(**axes))
    apart, size = (optax.tree.norm(x) for x in (jax.tree.map(jnp.subtract, one, many), one))
    assert apart <= 1e-5 * size
    assert metrics["padding"] >= 1 and more["padding"] >= 1


def test_what_a_row_gives_does_not_depend_on_its_company(params):
    """Rows that no advantage moves change only where the others lie."""
    batch, advantages = ragged_batch(width=140)
    config = UpdateConfig(
        groups=4,
        micro_tokens=200,
        objective=Objective(
            loss=objectives.Pg(), aggregation="token_sum_constant", aggregation_constant=10.0
        ),
    )
    of = jax.jit(lambda b, a: gradients(params, b, a, None, None, MODEL, config, make_mesh())[0])
    chosen = jnp.arange(len(advantages)) % 5 == 3
    order = jnp.asarray(np.random.default_rng(1).permutation(len(advantages)))
    alone = of(batch.replace(mask=batch.mask & chosen[:, None]), advantages)
    company = of(batch, jnp.where(chosen, advantages, 0.0))
    moved = of(jax.tree.map(lambda x: x[order], batch), jnp.where(chosen, advantages, 0.0)[order])
    rows = batch.mask.any(1).sum()
    trained = (batch.mask.any(1) & chosen).sum()
    # The constant is one of each row that is trained on.
    alone = jax.tree.map(lambda x: x * (trained / rows), alone)
    for other in (company, moved):
        apart = optax.tree.norm(jax.tree.map(jnp.subtract, alone, other))
        assert 0 < apart <= 1e-5 * optax.tree.norm(alone)


def test_what_is_computed_follows_the_tokens_held(params):
    """However long rows may be: room for eight times as much costs no more pieces of one size."""
    computed = []
    for width in (90, 720):
        batch, advantages = ragged_batch(width=90)

        def wide(x, width=width):
            return jnp.pad(x, ((0, 0), (0, width - 90)))

        batch = batch.replace(
            tokens=wide(batch.tokens),
            mask=wide(batch.mask),
            behaviour_logprobs=wide(batch.behaviour_logprobs),
        )
        config = UpdateConfig(groups=4, micro_tokens=720)
        metrics = jax.jit(
            lambda p, batch=batch, config=config, advantages=advantages: gradients(
                p, batch, advantages, None, None, MODEL, config, make_mesh()
            )
        )(params)[1]
        computed.append(float(metrics["sum/computed"]))
    assert computed[1] <= 1.1 * computed[0]
