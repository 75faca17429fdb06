"""Counts of a run: prompts by outcome, and the report of one step."""

import dataclasses
from typing import Any

import numpy as np

from rl_speed.rollout.generate import GenerationStats

# Decay per decided prompt. The acceptance estimate remembers about 200, a standard error of 0.03 at
# an acceptance of 0.2.
FORGET = 0.995


@dataclasses.dataclass
class PromptCounts:
    """Prompts by outcome since the run began.

    Always `screened = rejected + completed + dropped_stale + in flight`, and `completed = trained +
    waiting in the buffer + expired`. A prompt counts as screened, and in flight, from the dispatch
    of its first call.
    """

    screened: int = 0
    rejected: int = 0
    completed: int = 0
    solved: int = 0  # rejected with every sample correct
    failed: int = 0  # rejected with every sample wrong
    rejected_tokens: int = 0
    expired: int = 0  # complete, but too old when a training step came
    dropped_stale: int = 0  # accepted, but too old before it was continued
    # Tokens of prompts that went back because others filled the batch first.
    cancelled_tokens: int = 0
    # Samples that non-finite logits ended: they count as wrong and are not trained on.
    nonfinite: int = 0


@dataclasses.dataclass
class StepReport:
    """Report of one `next_groups`.

    A call's generation is counted when it is scored, so that each token counts once. Calls still
    pending when a run ends are in its checkpoint and in no total.
    """

    generation: GenerationStats = dataclasses.field(default_factory=GenerationStats)
    generate_s: float = 0.0  # preparing calls, and blocked waiting for their samples
    score_s: float = 0.0
    screened: int = 0
    accepted: int = 0
    rejected: int = 0
    short: int = 0  # groups missing because max_calls was reached
    # Pass rates of the first samples of each decided prompt.
    pass_rates: list[float] = dataclasses.field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """State of a step that was stopped between two calls."""
        return {**dataclasses.asdict(self), "pass_rates": np.asarray(self.pass_rates, np.float64)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "StepReport":
        """Inverse of `state_dict`."""
        cost = GenerationStats(**{name: int(value) for name, value in state["generation"].items()})
        return cls(
            **{**state, "generation": cost, "pass_rates": np.asarray(state["pass_rates"]).tolist()}
        )


class StarvedError(RuntimeError):
    """The rule rejects every prompt, so no group can be trained on. All processes of a run raise it
    at the same place.
    """

    exit_status = 1
    everywhere = True


def starved(what: str, advice: str, stats: GenerationStats) -> StarvedError:
    """The error of a step without a group to train on. Where logits that are not finite ended half
    of the samples or more, that is the cause, and is said first; where they ended some, last.

    Args:
      what: what happened. advice: what to do where the policy is sound.
    """
    broken = f"{stats.nonfinite:,} of {stats.samples:,} samples ended at logits that are not finite"
    if 2 * stats.nonfinite >= stats.samples > 0:
        return StarvedError(
            f"{broken}: the policy's weights, or what it computes of them, are broken. Go on from "
            "an earlier checkpoint with a lower config.optimizer.learning_rate, or check the "
            f"weights of config.model.path. So {what}"
        )
    return StarvedError(f"{what}. {advice}" + (f". {broken}" if stats.nonfinite else ""))
