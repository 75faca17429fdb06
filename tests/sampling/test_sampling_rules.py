"""Rules against slow Python references, over random counts."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_speed.sampling import ACCEPTED, COMPLETE, OPEN, REJECTED, SCREENING, Counts, Dynamic, Speed, Uniform
from rl_speed.sampling.rules import count_bounds


def play(rule, answers):
    """One prompt through a rule, asked whenever all that was launched is done. Returns (verdict, samples taken)."""
    state, taken = rule.init(1), 0
    decide = jax.jit(rule.decide)
    for _ in range(10):
        done = jnp.array([taken], jnp.int32)
        positive = jnp.array([sum(answers[:taken])], jnp.int32)
        decision, state = decide(Counts(done, done, positive), state)
        if int(decision.status[0]) != OPEN:
            return int(decision.status[0]), taken
        assert int(decision.want[0]) > taken, "an open prompt must want more"
        taken = int(decision.want[0])
        assert taken <= rule.max_samples
    raise AssertionError("the rule never ends")


def by_hand(rule, answers):
    if isinstance(rule, Uniform):
        return COMPLETE, rule.n
    if isinstance(rule, Dynamic):
        return (COMPLETE if 0 < sum(answers[:rule.n]) < rule.n else REJECTED), rule.n
    rate = Fraction(sum(answers[:rule.n_init]), rule.n_init)
    low, high = (x if np.isinf(x) else Fraction(str(x)) for x in (rule.low, rule.high))
    return (COMPLETE, rule.n_init + rule.n_cont) if low < rate < high else (REJECTED, rule.n_init)


@pytest.mark.parametrize("rule", [Uniform(5), Dynamic(4), Speed(4, 6), Speed(3, 3), Speed(5, 0), Speed(10, 2, 0.3, 0.7),
                                  Speed(4, 4, -np.inf, np.inf), Speed(1, 3, -np.inf, np.inf), Speed(6, 2, 0.5, np.inf)], ids=str)
def test_verdicts_and_sample_counts(rule):
    rng = np.random.default_rng(0)
    for p in (0.0, 0.1, 0.3, 0.5, 0.9, 1.0):
        for _ in range(12):
            answers = (rng.random(20) < p).tolist()
            assert play(rule, answers) == by_hand(rule, answers)


def test_thresholds_are_exact_fractions():
    """3 of 10 is not above 0.3, though float32(3) / float32(10) > 0.3 in some arithmetic; 1 of 3 lies above 0.333."""
    assert count_bounds(0.3, 0.7, 10) == (4, 6)
    assert count_bounds(0.3, 0.7, 10, inclusive=True) == (3, 7)
    assert count_bounds(0.333, 1, 3) == (1, 2)
    assert count_bounds(0, 1, 4) == (1, 3)
    assert count_bounds(-np.inf, np.inf, 4) == (0, 4)
    for n in range(1, 30):
        for k in range(n + 1):
            assert count_bounds(float(Fraction(k, n)) if Fraction(str(k / n)) == Fraction(k, n) else -1, 2, n)[1] == n


def test_verdict_is_frozen_once_given():
    """All continuation samples right: the pass rate over everything nears 1, and the prompt stays accepted."""
    rule = Speed(2, 4)
    state = rule.init(2)
    counts = Counts(*(jnp.array(x, jnp.int32) for x in ([2, 2], [2, 2], [1, 2])))
    decision, state = rule.decide(counts, state)
    assert decision.status.tolist() == [OPEN, REJECTED] and decision.want.tolist()[0] == 6
    assert state.phase.tolist()[0] == ACCEPTED
    counts = Counts(*(jnp.array(x, jnp.int32) for x in ([6, 2], [6, 2], [5, 2])))
    assert rule.decide(counts, state)[0].status.tolist()[0] == COMPLETE


def test_phase_is_no_function_of_counts():
    """n_init == n_cont: after the screening a prompt that waits for its continuation is not judged again."""
    rule = Speed(3, 3)
    state = rule.init(1)
    assert state.phase.tolist() == [SCREENING]
    three = jnp.array([3], jnp.int32)
    decision, state = rule.decide(Counts(three, three, jnp.array([1], jnp.int32)), state)
    again, state = rule.decide(Counts(three, three, jnp.array([0], jnp.int32)), state)
    assert again.status.tolist() == [OPEN] and again.want.tolist() == [6]


@pytest.mark.parametrize("make,message", [
    (lambda: Speed(1, 4), "Speed.*can accept no prompt"), (lambda: Speed(4, 4, 0.6, 0.7), "can accept no prompt"),
    (lambda: Speed(0, 4), "n_init must be an integer of at least 1"), (lambda: Speed(4, -1), "n_cont"),
    (lambda: Uniform(0), "Uniform.n"), (lambda: Dynamic(2.5), "Dynamic.n"),
])
def test_impossible_settings_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_lifting_the_sampler_needs_no_heavy_imports():
    import subprocess
    import sys

    code = ("import sys, rl_speed.sampling, rl_speed.objectives; "
            "print([m for m in ('transformers', 'orbax', 'math_verify', 'optax') if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
