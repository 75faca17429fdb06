"""Pools against slow references in NumPy: statistics, class-balanced down-sampling,
advantages; exact zeros; padding; errors.
"""

import jax
import numpy as np
import pytest

from rl_speed import objectives

pytestmark = pytest.mark.usefixtures("quick_compiles")

G = 9
R = 64


def pools(seed):
    """Unsorted ragged pools: empty (8), a singleton (0), constant ones (1, 2), others;
    padding; places in generation order.
    """
    rng = np.random.default_rng(seed)
    ids = np.concatenate(
        [
            [0],
            [1] * 6,
            [2] * 5,
            rng.choice([3, 4, 5, 6, 7], 45, p=[0.05, 0.2, 0.2, 0.25, 0.3]),
            [-1] * 7,
        ]
    )
    right = rng.random(R) < np.array([0.1, 0.5, 0.2, 0.9])[rng.integers(0, 4)]
    right[ids == 1] = True
    right[ids == 2] = False
    order = rng.permutation(R)
    return right[order], ids[order].astype(np.int32), rng.permutation(R).astype(np.int32)


def slow_downsample(right, ids, index, n, groups):
    kept = np.zeros(len(ids), bool)
    for g in np.flatnonzero(groups):
        rows = sorted(np.flatnonzero(ids == g), key=lambda r: index[r])
        yes = [r for r in rows if right[r]]
        no = [r for r in rows if not right[r]]
        take = yes[: n // 2] + no[: n - n // 2]
        # At most one class has more than its quota where the other lacks.
        rest = yes[n // 2 :] + no[n - n // 2 :]
        kept[take + rest[: n - len(take)]] = True
    return kept


@pytest.mark.parametrize("n", [2, 4, 7])
def test_downsampling_equals_the_slow_reference(n):
    for seed in range(12):
        right, ids, index = pools(seed)
        groups = np.random.default_rng(seed).random(G) < 0.8
        want = slow_downsample(right, ids, index, n, groups)
        np.testing.assert_array_equal(
            objectives.balanced_downsample(right, ids, G, n, index=index, groups=groups), want
        )
        plain = slow_downsample(right, ids, np.arange(R), n, np.ones(G, bool))
        np.testing.assert_array_equal(objectives.balanced_downsample(right, ids, G, n), plain)
        rows = np.asarray(objectives.kept_rows(plain, ids, G, n))
        assert rows.shape == (G, n) and rows.dtype == np.int32
        for g in range(G):
            mine = np.flatnonzero(plain & (ids == g))
            assert len(mine) == min(n, (ids == g).sum())
            np.testing.assert_array_equal(
                rows[g], np.concatenate([mine, np.full(n - len(mine), -1)])
            )


def test_random_selection_keeps_the_same_counts_whatever_the_order_of_the_rows():
    key = jax.random.key(3)
    n = 4
    for seed in range(6):
        right, ids, index = pools(seed)
        kept = np.asarray(
            objectives.balanced_downsample(right, ids, G, n, order="random", key=key, index=index)
        )
        first = slow_downsample(right, ids, index, n, np.ones(G, bool))
        for g in range(G):
            for side in (right, ~right):
                assert (kept & side & (ids == g)).sum() == (first & side & (ids == g)).sum()
        assert not kept[ids < 0].any()
        order = np.random.default_rng(seed).permutation(R)
        moved = objectives.balanced_downsample(
            right[order], ids[order], G, n, order="random", key=key, index=index[order]
        )
        np.testing.assert_array_equal(kept[order], moved)
        other = objectives.balanced_downsample(
            right, ids, G, n, order="random", key=jax.random.key(4), index=index
        )
        assert (kept != np.asarray(other)).any()


def test_random_selection_is_uniform_within_a_class():
    right = np.tile([1, 0, 0, 0, 1, 1, 0, 1], 3000)
    ids = np.repeat(np.arange(3000), 8).astype(np.int32)
    kept = objectives.balanced_downsample(
        right, ids, 3000, 4, order="random", key=jax.random.key(0)
    )
    share = np.asarray(kept).reshape(3000, 8).mean(0)
    np.testing.assert_allclose(share, 0.5, atol=4 * 0.5 / np.sqrt(3000))


def slow_advantages(right, ids, kept, normalise, weight, cap, correction):
    out = np.zeros(len(ids))
    for g in set(ids.tolist()) - {-1}:
        pool = right[ids == g].astype(float)
        if pool.std() == 0:
            continue
        p = pool.mean()
        mine = kept & (ids == g)
        for r in np.flatnonzero(mine):
            value = right[r] - p
            if normalise:
                value /= pool.std(ddof=1) + 1e-6
            value *= min(
                {"none": 1, "inv_p": 1 / p, "inv_sqrt_p": p**-0.5, "power": 0.5 * p**-0.5}[weight],
                cap or np.inf,
            )
            if correction == "importance":
                value *= (p if right[r] else 1 - p) / np.mean(right[mine] == right[r])
            out[r] = value
    return out


@pytest.mark.parametrize(
    "normalise, weight, cap, correction",
    [
        (False, "none", None, "none"),
        (True, "none", None, "importance"),
        (False, "inv_p", None, "importance"),
        (True, "inv_p", 3.0, "none"),
        (False, "inv_sqrt_p", 1.5, "importance"),
        (False, "power", None, "none"),
    ],
)
def test_advantages_equal_the_slow_reference(normalise, weight, cap, correction):
    alpha = 0.5 if weight == "power" else None
    for seed in range(4):
        right, ids, index = pools(seed)
        kept = np.asarray(objectives.balanced_downsample(right, ids, G, 4, index=index))
        garbage = np.where(ids >= 0, right, np.nan).astype(np.float32)
        got = objectives.pool_advantages(
            garbage,
            right,
            ids,
            G,
            kept,
            normalise=normalise,
            weight=weight,
            alpha=alpha,
            cap=cap,
            downsample_correction=correction,
        )
        assert got.shape == (R,) and got.dtype == np.float32
        np.testing.assert_allclose(
            got, slow_advantages(right, ids, kept, normalise, weight, cap, correction), atol=3e-6
        )
        # The singleton, both constant pools, padding.
        assert (np.asarray(got)[(ids < 3) | ~kept] == 0).all()


def test_importance_makes_the_kept_mean_that_of_the_pool():
    right = np.array([1, 0, 0, 0, 0, 0, 0, 1, 1, 0])
    ids = np.zeros(10, np.int32)
    kept = objectives.balanced_downsample(right, ids, 1, 4)
    value = np.asarray(
        objectives.pool_advantages(right, right, ids, 1, kept, downsample_correction="importance")
    )
    assert value[right == 1].sum() / 4 == pytest.approx(0.3 * 0.7) and value.sum() == pytest.approx(
        0, abs=1e-6
    )


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.0])
def test_constant_pools_are_exactly_zero_without_eps(value):
    rewards = np.array([value] * 5 + [0.0, 1.0, 7.0], np.float32)
    ids = np.array([0] * 5 + [1, 1, 2], np.int32)
    for right in (rewards > 0, rewards > 0.5):
        for weight in ("none", "inv_p", "inv_sqrt_p"):
            for correction in ("none", "importance"):
                out = objectives.pool_advantages(
                    rewards,
                    right,
                    ids,
                    3,
                    np.ones(8, bool),
                    normalise=True,
                    weight=weight,
                    downsample_correction=correction,
                    eps=0.0,
                )
                out = np.asarray(out)
                assert (
                    (out[[0, 1, 2, 3, 4, 7]] == 0).all()
                    and np.isfinite(out).all()
                    and (out[5:7] != 0).all()
                )


def test_statistics_and_who_is_resolved():
    right, ids, _ = pools(0)
    rewards = np.where(ids >= 0, right + 0.5, np.nan).astype(np.float32)
    got = objectives.pool_statistics(rewards, right, ids, G)
    for g in range(G):
        pool = rewards[ids == g]
        yes = right[ids == g].sum()
        assert got.count[g] == len(pool) and got.positives[g] == yes
        np.testing.assert_allclose(got.mean[g], pool.mean() if len(pool) else 0, rtol=1e-6)
        np.testing.assert_allclose(got.std[g], pool.std(ddof=1) if len(pool) > 1 else 0, atol=1e-6)
        assert got.constant[g] == (len(set(pool.tolist())) < 2)
        assert objectives.resolved(got, 2, 1)[g] == (yes >= 2 and len(pool) - yes >= 1)
    assert not objectives.resolved(got, 0, 0)[8]


def test_nothing_at_all():
    none = np.zeros(0, np.int32)
    kept = objectives.balanced_downsample(none, none, 2, 4)
    assert kept.shape == (0,) and (np.asarray(objectives.kept_rows(kept, none, 2, 4)) == -1).all()
    assert objectives.prompt_weights(np.array([0.0, 1.0]), "inv_p").tolist() == [0.0, 1.0]


def test_errors_name_the_argument():
    rows = np.zeros(4)
    ids = np.zeros(4, np.int32)
    cases = [
        (lambda: objectives.balanced_downsample(np.zeros(3), ids, 1, 4), "one length"),
        (lambda: objectives.balanced_downsample(rows, ids, 0, 4), "num_groups"),
        (lambda: objectives.balanced_downsample(rows, ids, 1, 1), "n must be at least 2"),
        (
            lambda: objectives.balanced_downsample(rows, ids, 1, 2, order="last"),
            "order must be one of",
        ),
        (lambda: objectives.balanced_downsample(rows, ids, 1, 2, order="random"), "needs a key"),
        (
            lambda: objectives.balanced_downsample(rows, ids, 1, 2, key=jax.random.key(0)),
            "needs a key",
        ),
        (
            lambda: objectives.balanced_downsample(rows, ids, 1, 2, index=np.zeros(3)),
            "index must have",
        ),
        (
            lambda: objectives.balanced_downsample(rows, ids, 1, 2, groups=np.ones(2, bool)),
            "groups must have",
        ),
        (
            lambda: objectives.pool_advantages(rows, rows, ids, 1, rows, weight="log"),
            "weight must be one of",
        ),
        (lambda: objectives.pool_advantages(rows, rows, ids, 1, np.zeros(3)), "one length"),
        (
            lambda: objectives.pool_advantages(rows, rows, ids, 1, rows, downsample_correction="x"),
            "downsample_correction",
        ),
        (lambda: objectives.prompt_weights(rows, "power"), "alpha"),
        (lambda: objectives.prompt_weights(rows, cap=-1), "cap"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


def test_a_critic_s_value_is_compared_with_every_sample():
    right, ids, _ = pools(0)
    values = np.random.default_rng(1).random(G).astype(np.float32)
    kept = np.random.default_rng(2).random(R) < 0.8
    got = objectives.pool_advantages(right, right, ids, G, kept, baseline=values)
    want = np.where(kept & (ids >= 0), right - values[ids], 0)
    np.testing.assert_allclose(got, want, atol=1e-7)  # the singleton and constant pools, too
    with pytest.raises(ValueError, match="baseline must have shape .9,.; got .8,."):
        objectives.pool_advantages(right, right, ids, G, kept, baseline=values[:8])
