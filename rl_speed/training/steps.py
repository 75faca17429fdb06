"""One interface for an RL step: split (`split_step.py`) or fused into one program
(`fused_step.py`).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from rl_speed.data.rollouts import Rollouts
from rl_speed.rollout.prompt_counts import StepReport
from rl_speed.rollout.screening import Screening
from rl_speed.runtime.metrics import PhaseTimer
from rl_speed.update.state import TrainState


class StepResult(NamedTuple):
    """Result of a step.

    Attributes:
      rollouts: whole groups, with the rewards they were trained with; None if `stop` ended the
        step.
      report: of generation. metrics: function that waits for the update and returns its metrics;
        empty if there was none.
    """

    rollouts: Rollouts | None
    report: StepReport
    metrics: Callable[[], dict[str, float]] = dict


def under_train(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of an update for the log: "train/NAME" of each, on the host."""
    return {f"train/{name}": float(value) for name, value in metrics.items()}


class Step(Protocol):
    """Generates, scores, updates. The state is donated.

    Attributes:
      screening: prompt counts, estimates, budgets and replayed responses.
      whole: False after an error left the state on the host half changed.
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
        """Returns (the state after the step, its result), without waiting for the update.

        `stop` is called between generation calls. If it returns True there are no rollouts and no
        update: the step keeps its samples, also in `state_dict`, and the next call continues it.
        There is also no update if non-finite logits ended every sample.

        Args:
          version: policy updates made so far; stored with every sample drawn now.

        Raises: errors of generation, scoring or update. If the step is still `whole`, it is as
        between two generation calls, and `state_dict` can be saved. The error's attribute `state`
        is the train state, if it differs from the given one.
        """

    def start_next(self, state: TrainState, version: int, timer: PhaseTimer) -> None:
        """Dispatches the first work of the next step, so that devices do not wait for the host.

        Results do not change. Afterwards, `screening` and `metrics` have the numbers of the next
        step.

        Args:
          state, version: those that the next step will be given.
        """

    def metrics(self, version: int) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
