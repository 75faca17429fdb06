"""Estimates of pass rates against the definition, one visit at a time."""

import numpy as np
import pytest

from rl_speed.estimates.counted import BetaEma


def test_equals_the_definition_over_random_visits():
    rng = np.random.default_rng(0)
    memory = BetaEma(2.0, 5.0, 0.8)
    visits = {f"p{i}": [] for i in range(6)}
    for _ in range(40):
        ids = rng.choice(list(visits), 3, replace=False)
        total = rng.integers(0, 9, 3)
        positive = rng.integers(0, total + 1)
        before = memory.estimate(ids)
        for i, seen in zip(ids, before):
            # The latest visit counts in full, the one before it 0.8 of that, and so on.
            weights = 0.8 ** np.arange(len(visits[i]))[::-1]
            k_sum, n_sum = (
                float(weights @ [v[j] for v in visits[i]]) if visits[i] else 0.0 for j in (0, 1)
            )
            assert seen == pytest.approx((k_sum + 2) / (n_sum + 7), rel=1e-12)
        memory.update(ids, positive, total)
        for i, k, n in zip(ids, positive, total):
            if n:
                visits[i].append((int(k), int(n)))
    assert len(memory) == sum(map(bool, visits.values()))


def test_unseen_prompts_have_the_prior_and_no_decay_keeps_everything():
    memory = BetaEma(decay=1.0)
    assert memory.estimate(["a"]).tolist() == [1 / 17] and len(memory) == 0
    for _ in range(10):
        memory.update(["a"], [1], [2])
    assert memory.estimate(["a", "b"]).tolist() == pytest.approx([11 / 37, 1 / 17])
    assert memory.estimate([]).shape == (0,)


def test_state_survives():
    memory = BetaEma()
    memory.update(["a", "é", "c"], [3, 0, 1], [4, 8, 1])
    memory.update(["é"], [1], [2])
    other = BetaEma()
    other.load_state_dict(memory.state_dict())
    assert (
        other.estimate(["a", "é", "c", "d"]).tolist()
        == memory.estimate(["a", "é", "c", "d"]).tolist()
    )
    for m in (memory, other):
        m.update(["c"], [2], [3])
    assert other.estimate(["c"]) == memory.estimate(["c"]) and len(other) == 3
    empty = BetaEma()
    empty.load_state_dict(BetaEma().state_dict())
    assert len(empty) == 0


def test_impossible_counts_change_nothing():
    memory = BetaEma()
    with pytest.raises(ValueError, match="prompt 'b': 3 correct of 2"):
        memory.update(["a", "b"], [1, 3], [2, 2])
    with pytest.raises(ValueError, match="one count for each prompt"):
        memory.update(["a"], [1, 2], [2])
    assert len(memory) == 0
    for change, message in [
        (dict(a=0), "BetaEma.a must be positive"),
        (dict(decay=1.5), r"BetaEma.decay must be in \(0, 1\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            BetaEma(**change)
