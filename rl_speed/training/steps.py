"""One signature for an RL step, however it is made: split (`split_step.py`) or fused into one
program (`fused_step.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from rl_speed.data.rollouts import Rollouts
from rl_speed.rollout.prompt_counts import StepReport
from rl_speed.rollout.screening import Screening
from rl_speed.runtime.metrics import PhaseTimer
from rl_speed.update.state import TrainState


class StepResult(NamedTuple):
    """What a step did.

    Attributes:
      rollouts: whole groups, with the rewards they were trained with; None where `stop`
        ended the step.
      report: what generation did. metrics: those of the update, when called, which waits for it;
        empty where there was none.
    """

    rollouts: Rollouts | None
    report: StepReport
    metrics: Callable[[], dict[str, float]] = dict


def under_train(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of an update as they are logged: "train/NAME" of each, on the host."""
    return {f"train/{name}": float(value) for name, value in metrics.items()}


class Step(Protocol):
    """Generate, score, update. The state is donated.

    Attributes:
      screening: what became of prompts, and what is known of those to come.
      whole: False where an error came while the state on the host was half changed.
    """

    screening: Screening
    whole: bool

    def __call__(
        self,
        state: TrainState,
        version: int,
        timer: PhaseTimer,
        stop: Callable[[], bool] = lambda: False,
    ) -> tuple[TrainState, StepResult]:
        """(the state after the step, what it did); the update itself is not waited for.

        No rollouts, and no update, where `stop`, which is asked between generation calls, says to
        go no further: the step holds what it has, in `state_dict` too, and the next call goes on
        with it. No update either where non-finite logits ended every sample.

        Args:
          version: policy updates made so far; stored with every sample drawn now.

        Raises: what goes wrong in generation, scoring or update. Unless it is not `whole`, the step
        is then as it was between two generation calls, and `state_dict` can be saved. The error has
        the train state as its attribute `state` where it is not the one that was given.
        """

    def start_next(self, state: TrainState, version: int, timer: PhaseTimer) -> None:
        """Send off what the next step begins with, so that devices do not wait for the host.

        Changes when things are computed, and nothing else: the next step would do it first. After
        it, the numbers of `screening` and `metrics` are those of the next step.

        Args:
          state, version: those that the next step will be given.
        """

    def metrics(self, version: int) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
