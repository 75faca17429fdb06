"""The benchmarks of decoding, of the step and of training: their own arithmetic,
and that both sides do the same work.
"""

import json

import jax
import numpy as np
import pytest

from lab.benchmark import decode, end_to_end, step, train
from lab.comparison.runs import Run, Variant
from rl_speed.policy import ModelConfig

pytestmark = pytest.mark.usefixtures("quick_compiles")


def QUIET(text):
    return None


def test_bytes_of_a_decode_step_by_hand():
    model = ModelConfig(
        vocab_size=10, width=4, layers=3, heads=4, kv_heads=2, head_dim=8, mlp_width=6
    )
    got = decode.bytes_per_step(
        decode.Workload(model, (4,)),
        weights=1000,
        held=np.array([5, 1]),
        cuts=np.array([7]),
        itemsize=2,
    )
    # Keys and values: 2 x 3 layers x 2 heads x 8 numbers x 2 bytes = 192 bytes a token; one context
    # for both rows.
    assert got == {"weights": 1000, "responses": 6 * 192, "contexts": 7 * 192}


def test_flops_of_a_training_token_by_hand():
    model = ModelConfig(
        vocab_size=10,
        width=4,
        layers=1,
        heads=2,
        kv_heads=1,
        head_dim=8,
        mlp_width=6,
        qkv_bias=False,
        tie_embeddings=False,
    )
    products = 4 * 16 + 2 * 4 * 8 + 16 * 4 + 3 * 4 * 6 + 4 * 10
    assert train.flops_per_token(model, width=20) == 6 * products + 3 * 2 * 16 * 20


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_flops_count_what_is_multiplied(dtype):
    """Against XLA's own count of the forward and backward pass,
    whose elementwise work comes on top.
    """
    from rl_speed.policy import forward, init

    model = ModelConfig(
        vocab_size=512,
        width=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp_width=256,
        qkv_bias=False,
        dtype=dtype,
    )
    tokens = np.ones((4, 64), np.int32)

    def loss(p):
        return forward(p, tokens, model).sum()

    cost = jax.jit(jax.grad(loss)).lower(init(model, jax.random.key(0))).compile().cost_analysis()
    ours = train.flops_per_token(model, 64) * tokens.size
    # XLA multiplies masked pairs too, which are half of all.
    assert 0.9 < cost["flops"] / ours < 1.5


@pytest.fixture(scope="module")
def stepped():
    return step.run(step.SMALL, repeats=1, say=QUIET)


@pytest.mark.slow  # test_training_fused.py shows it without timing it
def test_fused_and_pieces_do_the_same(stepped, tmp_path):
    assert (
        step.verdicts(stepped) == {"same parameters": True}
        and stepped["tokens"] > 0
        and stepped["grad_norm"] > 0
    )
    assert stepped["ratio"] == pytest.approx(stepped["pieces"] / stepped["median"]["fused"])
    assert (
        "pieces / fused" in step.table(stepped)
        and json.loads(json.dumps(stepped))["memory"] == stepped["memory"]
    )
    step.plot(stepped, tmp_path / "plot.png")
    worse = {**stepped, "parameters_apart": 1e-3}
    assert step.verdicts(worse) == {"same parameters": False}


def test_decoding_ways_are_timed_on_the_same_work(tmp_path):
    numbers = decode.run(decode.SMALL, repeats=1, say=QUIET)
    assert [(r["slots"], r["attention"]) for r in numbers["rows"]] == [(8, "dense"), (8, "ragged")]
    for row in numbers["rows"]:
        assert row["share_of_bandwidth"] == pytest.approx(
            sum(row["bytes_per_step"].values()) / row["seconds_per_step"] / numbers["bandwidth"]
        )
    assert numbers["rows"][0]["bytes_per_step"] == numbers["rows"][1]["bytes_per_step"]
    assert "no accelerator here" in decode.table(numbers)
    decode.plot(numbers, tmp_path / "plot.png")


def test_figures_leave_out_the_first_steps_and_those_that_compiled():
    def record(step, compiled=0.0):
        return {
            "time/step": 0.1 * step,
            "time/compile": compiled,
            "time/update": 0.05,
            "time/other": 0.0,
            "rollout/generated_tokens": 10.0 * step,
            "rollout/wasted_tokens": 3.0 * step,
            "rollout/decode_steps": 5.0,
            "rollout/slot_use": 0.5,
            "train/age_mean": 1.0,
        }

    run = Run(
        Variant("rloo"),
        0,
        {"evaluations": [{"eval/accuracy": 0.4}, {"eval/accuracy": 0.6}], "compilations": 7},
        [record(0, 9.0), record(1), record(2), record(3, 1.0), record(4)],
    )
    got = end_to_end.figures(run, skip=2)  # steps 2 and 4
    assert (
        got["ms_per_step"] == pytest.approx(300)
        and got["tokens"] == 30
        and got["update"] == pytest.approx(50)
    )
    assert (
        got["wasted_tokens"] == pytest.approx((12 - 3) / 3)
        and got["accuracy"] == 0.6
        and got["fused"] == 0
    )


@pytest.mark.slow
def test_end_to_end_reports_both_drivers(tmp_path):
    numbers = end_to_end.run(end_to_end.SMALL, repeats=1, say=QUIET)
    host, in_loop = numbers["rows"]
    assert (
        host["speedup"] == 1
        and in_loop["age"] == 0
        and host["fused"] == 0
        and in_loop["update"] == 0
    )
    assert end_to_end.verdicts(numbers) == {"zero sample age in the loop": True}
    assert host["tokens"] > 0 and 0 < in_loop["accuracy"] < 1
    assert "in_loop" in end_to_end.table(numbers)
    end_to_end.plot(numbers, tmp_path / "plot.png")
