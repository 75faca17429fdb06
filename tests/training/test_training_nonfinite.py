"""Samples that non-finite logits ended: wrong for the rule, counted, and in nobody's batch, cache or accuracy."""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_training_cache_start as starts
import test_training_driver as drivers
from killable import small_config

from rl_speed.config import Config
from rl_speed.evaluation import evaluate
from rl_speed.memory import ReplayCache
from rl_speed.data.group import Group
from rl_speed.sampling import Speed, Uniform, sample_adaptive
from rl_speed.sampling.batch import select, to_batch
from rl_speed.replay.cuts import Replay
from rl_speed.rollout.generate import Drawn, FinishedDraw
from rl_speed.training.cache_start import start_cache
from rl_speed.training.fused import PoolConfig, choose_samples, to_groups
from rl_speed.training.loop import NonFiniteError, Trainer
from rl_speed.runtime.metrics import read_lines
from rl_speed.update.shaping import shape_groups
from rl_speed.rollout.tally import StarvedError

pytestmark = pytest.mark.usefixtures("quick_compiles")

sys.path.insert(0, str(Path(__file__).parent.parent / "sampling"))
import test_sampling_adaptive as adaptive  # noqa: E402
import test_sampling_door as door  # noqa: E402
import toy_policy as toy  # noqa: E402


def break_some(dispatch, which):
    """The same generator, of whose samples those that `which(work, i)` names break off at their first token."""
    def broken(params, work):
        drawn, stats = dispatch(params, work).result()
        marked = []
        for w, d in zip(work, drawn):
            bad = d.nonfinite | np.array([which(w, w.first + i) for i in range(w.count)])
            clear = lambda x: np.where(bad.reshape(-1, *(1,) * (x.ndim - 1)), 0, x).astype(x.dtype)
            marked.append(dataclasses.replace(d, tokens=clear(d.tokens), logprobs=clear(d.logprobs), lengths=clear(d.lengths),
                                              truncated=clear(d.truncated), nonfinite=bad))
        return FinishedDraw(marked, dataclasses.replace(stats, nonfinite=int(sum(d.nonfinite.sum() for d in marked))))

    return broken


@pytest.mark.parametrize("depth", [0, 1])
def test_the_host_driver_counts_them_as_wrong(depth):
    """Whatever the scorer says of what is left of them; in saved state, too, of which older ones know nothing."""
    driver, generator = drivers.make(Uniform(6), depth=depth)
    driver._generate = break_some(generator.dispatch, lambda work, i: i == work.prompt.visit % 6)
    driver._score = lambda prompts, drawn: (np.ones(len(prompts), np.float32), np.ones(len(prompts), bool))
    groups, report = driver.next_groups(None, 0)
    for g in groups:
        np.testing.assert_array_equal(g.nonfinite, np.arange(6) == g.prompt.visit % 6)
        np.testing.assert_array_equal(g.correct, ~g.nonfinite)
        np.testing.assert_array_equal(g.rewards, g.correct)
        assert len(g.finite()) == 5 and not g.finite().nonfinite.any()
    assert report.generation.nonfinite == driver.tally.nonfinite == report.generation.samples // 6 > 0
    state = driver.state_dict()
    again, _ = drivers.make(Uniform(6), depth=depth)
    again.load_state_dict(state)
    assert again.tally == driver.tally
    for call, other in zip(driver._pending, again._pending, strict=True):
        for a, b in zip(call.draw.result()[0], other.draw.result()[0], strict=True):
            np.testing.assert_array_equal(a.nonfinite, b.nonfinite)
    del state["tally"]["nonfinite"]
    for call in state["pending"].values():
        del call["stats"]["nonfinite"], call["drawn"]["nonfinite"]
    again.load_state_dict(state)
    assert not any(d.nonfinite.any() for call in again._pending for d in call.draw.result()[0])


class BreaksAtTwo:
    """A step whose third call finds weights that are not finite."""

    def __init__(self, step):
        self._step = step

    def __getattr__(self, name):
        return getattr(self._step, name)

    def __call__(self, state, version, *args):
        broken = state.replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params)) if version == 2 else state
        return self._step(broken, version, *args)


def test_a_run_trains_on_the_others_and_stops_where_there_are_none(tmp_path):
    config = small_config(steps=6)
    config.evaluation.every, config.rule.low, config.rule.high = 0, -1.0, 2.0
    trainer, batches = Trainer(config, tmp_path), []
    rl_step = trainer.rl_step
    rl_step.driver._generate = break_some(rl_step.driver._generate, lambda work, i: (work.prompt.visit + i) % 8 == 0)
    update = rl_step._update
    rl_step._update = lambda state, batch, *more: batches.append(jax.device_get(batch)) or update(state, batch, *more)
    trainer.rl_step = BreaksAtTwo(rl_step)
    with pytest.raises(NonFiniteError, match="every response to train on in step .* ended at logits that are not finite.*npz"):
        trainer.run()
    records = read_lines(tmp_path / "metrics.jsonl")
    # At step 2 there are samples of the step before, and an update that is not finite.
    assert [r["skipped"] for r in records] == [0, 0, 1]
    assert all(0 < r["nonfinite_samples"] for r in records) and records[1]["tally/nonfinite"] > records[0]["tally/nonfinite"]
    assert records[0]["nonfinite_samples"] < records[0]["generated_samples"] / 4
    for batch in batches[:2]:
        # Four groups of seven; the other rows are padding, without a token of what broke off.
        assert (np.bincount(batch.group_ids + 1) == [4, 7, 7, 7, 7]).all()
        assert (batch.mask.any(axis=1) == (batch.group_ids >= 0)).all() and not batch.tokens[batch.group_ids < 0].any()


def test_starved_by_a_broken_policy_says_so():
    driver, generator = drivers.make(Speed(4, 8), max_calls=2)
    driver._generate = break_some(generator.dispatch, lambda *_: True)
    with pytest.raises(StarvedError, match=r"change the data\. (\d+) of \1 samples ended at logits that are not finite"):
        driver.next_groups(None, 0)


def test_the_fused_batch_leaves_them_out():
    table, _ = door.broken_table(toy.table())
    prompts, rule = adaptive.prompts_of(adaptive.make_case(0, 12)), Speed(4, 3)
    samples, counts = sample_adaptive(toy.DECODER, {"table": jnp.asarray(table)}, prompts, rule, adaptive.verify, 3, adaptive.KEY,
                                      adaptive.CONFIG)
    @jax.jit
    def lay_out(samples, counts, prompts):
        drawn = select(samples, counts, 3, rule.max_samples)
        return (drawn, to_batch(drawn, prompts, adaptive.LENGTH + adaptive.MAX_NEW),
                choose_samples(drawn, prompts, PoolConfig(), 21, adaptive.KEY)[0])

    drawn, batch, chosen = jax.device_get(lay_out(samples, counts, prompts))
    broken = np.asarray(drawn.nonfinite).ravel()
    used = np.asarray(drawn.used).ravel()
    assert 0 < broken.sum() < used.sum() and not (broken & ~used).any()
    np.testing.assert_array_equal(batch.group_ids >= 0, used & ~broken)
    np.testing.assert_array_equal(np.asarray(batch.mask).any(axis=1), used & ~broken)
    assert not np.any(batch.tokens[broken]) and np.isfinite(batch.behaviour_logprobs).all() and not np.any(batch.rewards[broken])
    assert sorted(chosen[:(used & ~broken).sum()]) == np.flatnonzero(used & ~broken).tolist()
    groups = to_groups(drawn, drivers.prompts(12), 1, 0, 4)
    np.testing.assert_array_equal(np.concatenate([g.nonfinite for g in groups]), broken[used])


def group(lengths, rewards, nonfinite):
    n, width = len(lengths), 6
    tokens = np.where(np.arange(width) < np.array(lengths)[:, None], 3, 0)
    prompt = dataclasses.replace(drivers.prompts(1)[0], visit=0)
    return Group(prompt=prompt, tokens=tokens, lengths=lengths, logprobs=np.where(tokens > 0, -1.0, 0.0), rewards=rewards,
                 versions=np.zeros(n), phases=np.zeros(n), sample_index=np.arange(n), truncated=np.zeros(n, bool),
                 nonfinite=nonfinite)


def test_replay_and_shaped_rewards_pass_them_over():
    # By summed log-prob the one that broke off after one token would be the best of the wrong ones.
    one = group([4, 1, 5], [0, 0, 0], [False, True, False])
    cache = ReplayCache(eps=1.0)
    cache.update(one)
    assert len(cache.get("p0").tokens) == 4 and cache.get("p0").shortest == 4
    cache.update(group([2, 1], [0, 0], [True, True]))
    assert len(cache.get("p0").tokens) == 4
    config = Config()
    config.reward.length_alpha = 0.5
    whole, = shape_groups([group([4, 1, 6], [1, 0, 1], [False, True, False])], config)
    without, = shape_groups([group([4, 6], [1, 1], [False, False])], config)
    np.testing.assert_array_equal(whole.rewards, [without.rewards[0], 0, without.rewards[1]])
    replay = Replay(np.array([7, 8]), np.array([2, 1]), np.array([4, 4]))
    drawn = Drawn(np.zeros((2, 6), np.int32), np.zeros((2, 6)), np.array([0, 3]), np.zeros(2, bool),
                  nonfinite=np.array([True, False]))
    assert drawn.behind(replay).nonfinite.tolist() == [True, False] and drawn.behind(replay).lengths.tolist() == [2, 4]


def test_a_cache_start_leaves_their_prompts_without_a_response():
    generator, cache = starts.FakeGenerator(), ReplayCache(eps=None)
    generator.dispatch = break_some(generator.dispatch, lambda work, i: work.prompt.visit % 3 == 0)
    cost = start_cache(generator, None, starts.prompts(10), starts.score, cache)
    assert cost.sampled == 10 and sorted(p.id for p in starts.prompts(10) if p.id not in cache) == ["p0", "p3", "p6", "p9"]


def test_evaluation_counts_them_as_wrong():
    generator = drivers.FakeGenerator(Uniform(4), drivers.Driver(groups=4, screen_prompts=8, buffer_groups=8))
    generator.dispatch = break_some(generator.dispatch, lambda work, i: i == 1)
    right = lambda prompts, drawn: np.ones(len(prompts), bool)
    result = evaluate(generator, None, drivers.prompts(6), 4, right, 3)
    assert result.correct.tolist() == [3] * 6 and result.stats.nonfinite == 6 and result.metrics()["eval/nonfinite"] == 6
    assert np.isfinite(result.entropy).all()
