"""Numbers of a step: rewards by sample and by prompt, and what sequential sampling did by round."""

import numpy as np
import pytest
from fake_generation import rollouts_of

from rl_speed.data.prompts import Prompt
from rl_speed.rollout.screening import StepReport
from rl_speed.sampling import Sequential, Uniform
from rl_speed.training.records import by_round, describe


def rollouts(groups):
    """Groups of (samples, right ones among them)."""
    nothing = np.array([1], np.int32)
    prompts = [Prompt(f"p{i}", nothing, "", nothing, "", visit=i) for i in range(len(groups))]
    owner = np.repeat(np.arange(len(groups)), [n for n, _ in groups])
    right = np.concatenate([np.arange(n) < k for n, k in groups])
    return rollouts_of(prompts, [[1]] * len(owner), owner, rewards=right, correct=right)


def test_batch_level_and_prompt_level_rewards_differ_by_the_covariance_with_the_budget():
    groups = [(8, 0), (2, 2), (4, 1), (2, 1)]
    found = describe(0, rollouts(groups), StepReport())
    n = np.array([g[0] for g in groups])
    r = np.array([k / g for g, k in groups])
    assert found["train/accuracy_prompts"] == pytest.approx(1.75 / 4)
    assert found["train/accuracy"] == 4 / 16 and found["train/all_correct"] == 0.25
    # Reinforce-Ada, appendix C.2; its Cov is a sum over prompts.
    covariance = ((n - n.mean()) * (r - r.mean())).sum()
    assert (found["train/accuracy"] - found["train/accuracy_prompts"]) * n.sum() == pytest.approx(
        covariance
    )
    assert covariance < 0


def test_prompts_by_round_of_sequential_sampling():
    # Rounds of 4. Resolved in rounds 1, 1, 2 and 3; never, for want of a wrong or of a right one.
    groups = [(4, 2), (4, 3), (8, 1), (12, 1), (12, 12), (12, 0)]
    found = by_round(rollouts(groups), Sequential(m=4, rounds=3, k_pos=1, k_neg=1))
    assert found == {
        "round/active_1": 6,
        "round/active_2": 4,
        "round/active_3": 3,
        "round/resolved_1": 2,
        "round/resolved_2": 3,
        "round/resolved_3": 4,
    }
    # "pos" is content with what is always right.
    positive = by_round(rollouts([(4, 4), (12, 0)]), Sequential(m=4, rounds=3, k_pos=1, k_neg=0))
    assert positive["round/resolved_1"] == positive["round/resolved_3"] == 1
    assert by_round(rollouts(groups), Uniform(4)) == {}


def test_every_number_of_a_step_has_a_section():
    names = describe(0, rollouts([(2, 1), (2, 0)]), StepReport())
    for name in names:
        assert name.partition("/")[0] in ("train", "rollout") and name.count("/") >= 1
