"""Format, language and length-aware rewards against their definitions."""

import functools
import math

import jax
import numpy as np
import pytest

from rl_speed.rewards import format_reward, language_reward, length_aware_reward

pytestmark = pytest.mark.usefixtures("quick_compiles")

GOOD = "<think>some thought</think>a summary<end>"


@pytest.mark.parametrize(
    "text, score",
    [
        (GOOD, 1.0),
        ("\n" + GOOD + "\n", 1.0),
        ("Well. " + GOOD, 0.6),  # does not start with the tag, so nothing is properly inside
        ("<think> </think>a summary<end>", 0.8),
        ("<think>some thought</think> \n<end>", 0.8),
        ("<think>some thought</think>a summary", 0.8),
        ("<think>some thought that never ends", 0.2),
        ("just an answer<end>", 0.2),
        ("", 0.0),
    ],
)
def test_format_checks(text, score):
    ended = [text.rstrip().endswith("<end>")]
    assert format_reward([text.replace("<end>", "")], ended)[0] == np.float32(score)


def test_format_wants_an_end_for_each_response():
    with pytest.raises(ValueError, match="2 responses but 1"):
        format_reward([GOOD, GOOD], [True])


@pytest.mark.parametrize(
    "text, share",
    [
        ("Therefore $x_1 = \\frac{3}{4}$,\n\tand 10% more!", 1.0),
        ("√2 ≤ 3 × 4 “so”", 1.0),  # symbols of any block
        ("答案", 0.0),
        ("ab答案", 0.5),
        ("né", 0.5),
        ("", 0.0),
    ],
)
def test_language_share(text, share):
    assert language_reward([text]).tolist() == [share]


def length_aware_by_hand(rewards, lengths, groups, alpha, low, high, reference, literal):
    shaped = []
    for reward, length, group in zip(rewards, lengths, groups):
        if group < 0:
            shaped.append(0.0)
            continue
        members = [
            (r, n)
            for r, n, g in zip(rewards, lengths, groups)
            if g == group and (reference == "all" or r > 0)
        ]
        mean = sum(n for _, n in members) / max(len(members), 1)
        value = reward / (1 + math.exp(-alpha * (mean - length)))
        value = min(max(value, low), high)
        shaped.append(value if literal or reward > 0 else reward)
    return shaped


@pytest.mark.parametrize("reference", ["all", "correct"])
@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("bounds", [(0.5, 1.0), (0.0, 0.4)])
def test_length_aware_against_the_formula(reference, literal, bounds):
    rng = np.random.default_rng(0)
    groups = np.asarray([0, 0, 0, 1, 1, 2, -1, 3, 3, 0, -1, 2], np.int32)
    rewards = rng.integers(0, 2, 12).astype(np.float32)
    rewards[groups == 3] = 0  # nobody correct here
    rewards[groups == 1] = 1
    lengths = rng.integers(50, 900, 12).astype(np.int32)
    options = dict(alpha=0.01, low=bounds[0], high=bounds[1], reference=reference, literal=literal)
    function = jax.jit(functools.partial(length_aware_reward, num_groups=4, **options))
    found = function(rewards, lengths, groups)
    assert found.dtype == np.float32
    expected = length_aware_by_hand(rewards, lengths, groups, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_shorter_earns_more_and_wrong_earns_nothing():
    found = length_aware_reward(
        np.float32([1, 1, 0]), np.int32([100, 300, 10]), np.int32([0, 0, 0]), 1, low=0.0
    )
    assert found[0] > found[1] > found[2] == 0


def test_extreme_lengths_stay_finite():
    found = length_aware_reward(
        np.float32([1, 1]), np.int32([1, 1_000_000]), np.int32([0, 0]), 1, low=0.1
    )
    np.testing.assert_allclose(found, [1.0, 0.1], rtol=1e-6)


def test_unknown_reference_is_refused():
    with pytest.raises(ValueError, match="reference"):
        length_aware_reward(np.ones(1), np.ones(1), np.zeros(1, np.int32), 1, reference="some")
