"""The probability that a rule accepts a prompt: closed forms, counts against a slow reference,
what is learned.
"""

import numpy as np
import pytest

from rl_speed.rollout.acceptance import EDGES, FORGET, WEIGHT, Acceptance, qualified, qualifying
from rl_speed.rollout.counted import BetaEma
from rl_speed.sampling import Band, Dynamic, Speed, Uniform

RULE = Speed(4, 20)


def test_what_qualifies_is_the_rules_to_say():
    p = np.array([0.0, 0.1, 0.5, 1.0])
    q = 1 - p
    for rule, expected in [
        (Speed(4, 20), 1 - p**4 - q**4),
        (Dynamic(6), 1 - p**6 - q**6),
        (Uniform(6), 1 - p**6 - q**6),
        (Speed(4, 20, -np.inf, np.inf), np.ones(4)),
        (Band(4, 0.25, 0.5), 4 * p * q**3 + 6 * p**2 * q**2),
        (Speed(4, 4, 0.25, 1.0), 1 - p**4 - q**4 - 4 * p * q**3),
    ]:
        np.testing.assert_allclose(qualifying(rule)(p), expected, atol=1e-12, err_msg=str(rule))


def test_what_qualified_shows_in_the_counts():
    cases = [
        # The last had three of four, and then all right.
        (Speed(4, 20), [(0, 4, 0), (4, 4, 0), (1, 4, 1), (24, 24, 1)]),
        (Speed(4, 4, 0.25, 1.0), [(1, 4, 0), (2, 4, 1), (1, 8, 1)]),
        (Band(4, 0.25, 0.5), [(1, 4, 1), (2, 4, 1), (3, 4, 0)]),
        (Dynamic(6), [(0, 6, 0), (5, 6, 1), (6, 6, 0)]),
        (Uniform(6), [(0, 6, 0), (1, 6, 1)]),
    ]
    for rule, counts in cases:
        positive, total, expected = zip(*counts)
        assert qualified(rule, positive, total).tolist() == [bool(x) for x in expected], rule


def test_counts_of_alike_prompts_against_a_slow_reference():
    rng, ids = np.random.default_rng(0), [f"p{i}" for i in range(30)]
    acceptance, estimates, counts = (
        Acceptance(RULE, BetaEma(0.5, 0.5, 0.8)),
        BetaEma(0.5, 0.5, 0.8),
        {},
    )

    def class_of(i):
        return (
            0
            if not estimates.visited([i])[0]
            else 1 + sum(edge < estimates.estimate([i])[0] for edge in EDGES)
        )

    for _ in range(60):
        some = rng.choice(ids, 7, replace=False).tolist()
        total = rng.choice([0, 4, 24], 7).tolist()
        right = [int(rng.binomial(n, rng.choice([0.0, 0.02, 0.5, 0.98, 1.0]))) for n in total]
        classes = {i: class_of(i) for i in some}
        assert acceptance.look(some)[1].tolist() == list(classes.values())
        for c in set(classes.values()):
            mine = [(k, n) for i, k, n in zip(some, right, total) if classes[i] == c and n]
            good = sum(n > 4 or 0 < k < 4 for k, n in mine)
            old = counts.get(c, (0.0, 0.0))
            counts[c] = tuple(
                x * FORGET ** len(mine) + new for x, new in zip(old, (good, len(mine) - good))
            )
        acceptance.update(some, right, total)
        estimates.update(some, right, total)
    found = acceptance.state_dict()["counts"]
    expected = np.zeros_like(found)
    expected[:, list(counts)] = np.array(list(counts.values())).T
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert found.sum() > 200 and (found.sum(0) > 0).sum() >= 8


def test_it_starts_from_the_acceptance_at_the_estimate_and_learns_what_the_estimate_does_not_say():
    """Never right stays so, always right does not: at first the two are alike,
    later they are not.
    """
    acceptance, rng = Acceptance(RULE, BetaEma(0.5, 0.5)), np.random.default_rng(0)
    means = lambda c: acceptance.draw(np.full(20_000, c), np.random.default_rng(1)).mean()
    assert means(0) == pytest.approx(1 - 2 / 2**4, abs=0.01)  # at the prior mean, 1/2
    never, always = ([f"{kind}{i}" for i in range(200)] for kind in ("never", "always"))
    acceptance.update([*never, *always], [0] * 200 + [4] * 200, [4] * 400)
    (low,), (high,) = (set(acceptance.look(ids)[1].tolist()) for ids in (never, always))
    assert means(low) == pytest.approx(means(high), abs=0.02) and means(low) == pytest.approx(
        qualifying(RULE)(np.array([0.09]))[0], abs=0.02
    )
    right = 4 - rng.binomial(1, 0.2, 200)  # one in five has a wrong answer
    acceptance.update([*never, *always], [0] * 200 + right.tolist(), [4] * 400)
    share = lambda good: (good + WEIGHT * qualifying(RULE)(np.array([0.09]))[0]) / (200 + WEIGHT)
    assert means(low) == pytest.approx(share(0), abs=0.005)
    assert means(high) == pytest.approx(share((right == 3).sum()), abs=0.005)


def test_state_survives_and_nothing_changes_where_counts_cannot_be():
    acceptance = Acceptance(RULE, BetaEma())
    acceptance.update(["a", "b"], [1, 0], [24, 4])
    before = acceptance.state_dict()
    with pytest.raises(ValueError, match="prompt 'b'"):
        acceptance.update(["a", "b"], [1, 5], [4, 4])
    other = Acceptance(RULE, BetaEma())
    other.load_state_dict(before)
    for each in (acceptance, other):
        np.testing.assert_array_equal(each.state_dict()["counts"], before["counts"])
        assert [x.tolist() for x in each.look(["a", "b", "c"])] == [
            x.tolist() for x in acceptance.look(["a", "b", "c"])
        ]
