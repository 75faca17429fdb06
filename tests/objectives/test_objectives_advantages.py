"""Advantages against slow, obvious references on ragged groups; exact zeros; padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_speed import objectives

pytestmark = pytest.mark.usefixtures("quick_compiles")

G = 7


def ref_rloo(group):
    n = len(group)
    if n < 2:
        return [0.0] * n
    return [r - sum(group[:i] + group[i + 1 :]) / (n - 1) for i, r in enumerate(group)]


def ref_dr_grpo(group):
    return [r - sum(group) / len(group) for r in group] if len(group) > 1 else [0.0]


def ref_grpo(group, eps=1e-6):
    if len(set(group)) < 2:
        return [0.0] * len(group)
    return [(r - np.mean(group)) / (np.std(group, ddof=1) + eps) for r in group]


def ref_ngrpo(group, eps=1e-6):
    whole = [*group, 1.0]
    spread = np.std(whole, ddof=1)
    return [(r - np.mean(whole)) / (spread + eps) if spread else 0.0 for r in group]


def by_group(reference, rewards, ids):
    out = [0.0] * len(rewards)
    for g in set(ids) - {-1}:
        rows = [i for i, other in enumerate(ids) if other == g]
        for i, a in zip(rows, reference([float(rewards[i]) for i in rows])):
            out[i] = a
    return np.array(out)


def ref_reinforce(rewards, ids):
    rows = [i for i, g in enumerate(ids) if g >= 0]
    mean = np.mean([rewards[i] for i in rows])
    return np.array([r - mean if g >= 0 else 0.0 for r, g in zip(rewards, ids)])


def ref_reinforce_pp(rewards, ids, lengths, baseline):
    raw = by_group(ref_dr_grpo, rewards, ids) if baseline else rewards
    tokens = [raw[i] for i, g in enumerate(ids) if g >= 0 for _ in range(lengths[i])]
    out = np.zeros(len(rewards))
    for i, g in enumerate(ids):
        same = [rewards[j] for j, other in enumerate(ids) if other == g]
        if g < 0 or (baseline and len(set(same)) < 2):
            continue
        out[i] = (raw[i] - np.mean(tokens)) / (np.std(tokens) + 1e-8)
    return out


def batches(seed, shaped):
    """Ragged, unsorted groups, among them empty, singleton and constant ones, and padding."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([[0], [1] * 4, rng.choice([2, 3, 4, 5], 22), [-1] * 5])
    rewards = rng.normal(size=32) + 3 if shaped else rng.integers(0, 2, 32)
    rewards = rewards.astype(np.float32)
    rewards[1:5] = rewards[1]
    order = rng.permutation(32)
    return rewards[order], ids[order].astype(np.int32), rng.integers(1, 9, 32)


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_match_references_on_ragged_groups(seed, shaped):
    rewards, ids, lengths = batches(seed, shaped)
    plain = {"rloo": ref_rloo, "dr_grpo": ref_dr_grpo, "grpo": ref_grpo, "ngrpo": ref_ngrpo}
    for name, reference in plain.items():
        got = getattr(objectives, name)(rewards, ids, G)
        assert got.dtype == jnp.float32 and got.shape == (32,)
        np.testing.assert_allclose(
            got, by_group(reference, rewards.tolist(), ids.tolist()), atol=2e-6, err_msg=name
        )
    np.testing.assert_allclose(
        objectives.reinforce(rewards, ids, G), ref_reinforce(rewards, ids), atol=2e-6
    )
    for baseline in (False, True):
        np.testing.assert_allclose(
            objectives.reinforce_pp(rewards, ids, G, lengths, baseline),
            ref_reinforce_pp(rewards.astype(np.float64), ids, lengths, baseline),
            atol=5e-6,
        )
        np.testing.assert_allclose(
            objectives.reinforce_pp(rewards, ids, G, baseline=baseline),
            ref_reinforce_pp(rewards.astype(np.float64), ids, [1] * 32, baseline),
            atol=5e-6,
        )


def test_ngrpo_learns_from_groups_of_wrong_samples_alone():
    rewards = np.array([0.0] * 4 + [1.0] * 4 + [0.0, 1.0], np.float32)
    ids = np.repeat([0, 1, 2], [4, 4, 2]).astype(np.int32)
    wrong, right, mixed = np.split(np.asarray(objectives.ngrpo(rewards, ids, 3)), [4, 8])
    assert (wrong < 0).all() and not right.any() and mixed[0] < 0 < mixed[1]


def test_group_statistics_match_numpy():
    rewards, ids, _ = batches(3, True)
    stats = objectives.group_statistics(rewards, ids, G)
    for g in range(G):
        group = rewards[ids == g]
        assert stats.count[g] == len(group)
        np.testing.assert_allclose(stats.mean[g], group.mean() if len(group) else 0, rtol=1e-6)
        std = group.std(ddof=1) if len(group) > 1 else 0
        np.testing.assert_allclose(stats.std[g], std, atol=1e-6)
        assert stats.constant[g] == (len(set(group.tolist())) < 2)


def in_group(eps):
    return {
        "rloo": objectives.rloo,
        "dr_grpo": objectives.dr_grpo,
        "grpo": lambda r, g, n: objectives.grpo(r, g, n, eps=eps),
        "pp": lambda r, g, n: objectives.reinforce_pp(r, g, n, baseline=True, eps=eps),
    }


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1.0, -2.7e7, 1e-30])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_constant_groups_and_singletons_are_exactly_zero(size, value):
    # Beside a group with signal, since whitening needs some.
    rewards = np.array([value] * size + [0.0, 0.3, 1.0], np.float32)
    rewards = np.concatenate([rewards, np.zeros(9 - len(rewards), np.float32)])
    ids = np.array([0] * size + [1] * 3 + [-1] * (6 - size), np.int32)
    for name, advantage in in_group(eps=0.0).items():
        out = np.asarray(advantage(rewards, ids, 2))
        assert np.all(out[:size] == 0), name
        assert np.all(out[size : size + 3] != 0) and np.all(np.isfinite(out)), name


@pytest.mark.parametrize("baseline", [False, True])
def test_batch_baselines_are_zero_on_a_constant_batch(baseline):
    rewards = np.full(7, 0.1, np.float32)
    ids = np.array([0, 0, 0, 1, 1, 2, -1], np.int32)
    lengths = np.array([3, 7, 1, 9, 4, 2, 5])
    assert np.all(np.asarray(objectives.reinforce(rewards, ids, 3)) == 0)
    out = objectives.reinforce_pp(rewards, ids, 3, lengths, baseline, eps=0.0)
    assert np.all(np.asarray(out) == 0)
    # Rows without tokens take no part in the statistics: still no spread.
    rewards[2] = 5.0
    lengths[2] = 0
    out = objectives.reinforce_pp(rewards, ids, 3, lengths, False, eps=0.0)
    assert np.all(np.asarray(out) == 0)


def every(eps=1e-6):
    return in_group(eps) | {
        "reinforce": objectives.reinforce,
        "pp_batch": lambda r, g, n: objectives.reinforce_pp(r, g, n, eps=eps),
    }


def test_padding_rows_are_inert():
    rewards, ids, _ = batches(1, True)
    real = ids >= 0
    garbage = np.where(real, rewards, np.resize([np.nan, np.inf, -1e30], 32))
    for name, advantage in every().items():
        out = np.asarray(advantage(garbage.astype(np.float32), ids, G))
        assert np.all(out[~real] == 0), name
        np.testing.assert_array_equal(out, advantage(rewards, ids, G), err_msg=name)
        np.testing.assert_allclose(
            out[real], advantage(rewards[real], ids[real], G), atol=2e-6, err_msg=name
        )
        all_padding = advantage(garbage.astype(np.float32), np.full(32, -1, np.int32), G)
        assert np.all(np.asarray(all_padding) == 0), name
    lengths = jnp.where(real, 4.0, jnp.nan)
    out = objectives.reinforce_pp(garbage.astype(np.float32), ids, G, lengths)
    np.testing.assert_allclose(out, objectives.reinforce_pp(rewards, ids, G), atol=2e-6)


def test_row_order_and_group_labels_do_not_matter():
    rewards, ids, _ = batches(2, True)
    order = np.random.default_rng(0).permutation(32)
    relabel = np.array([4, 2, 6, 0, 1, 3, 5, -1], np.int32)
    for name, advantage in every().items():
        out = advantage(rewards, ids, G)
        moved = advantage(rewards[order], relabel[ids[order]], G)
        np.testing.assert_allclose(out[order], moved, atol=2e-6, err_msg=name)


def test_adding_a_constant_to_rewards_changes_nothing():
    rewards, ids, _ = batches(4, False)
    for name, advantage in every().items():
        np.testing.assert_array_equal(
            advantage(rewards, ids, G), advantage(rewards + 1024, ids, G), err_msg=name
        )


def test_gradients_are_finite_at_zero_spread():
    ids = np.array([0, 0, 0, 1, 2, 2, -1], np.int32)

    @jax.jit
    @jax.grad
    def grad(rewards):
        return sum(jnp.sum(jnp.square(f(rewards, ids, 3)) + rewards) for f in every(0.0).values())

    mixed = grad(jnp.array([0.1, 0.1, 0.1, 0.4, 0.0, 1.0, jnp.nan]))
    assert np.all(np.isfinite(np.asarray(mixed)))
    assert np.all(np.isfinite(grad(jnp.full(7, 0.1))))


def test_shape_errors_name_the_argument():
    with pytest.raises(ValueError, match="one length"):
        objectives.rloo(np.zeros(3), np.zeros(4, np.int32), 2)
    with pytest.raises(ValueError, match="num_groups"):
        objectives.rloo(np.zeros(3), np.zeros(3, np.int32), 0)
    with pytest.raises(ValueError, match="lengths"):
        objectives.reinforce_pp(np.zeros(3), np.zeros(3, np.int32), 2, np.zeros(4))
