"""An oracle: pass rates of training prompts, measured beside the run and charged to nobody."""

from collections.abc import Callable, Sequence
from typing import Any

from rl_speed.config import Data
from rl_speed.data.held_out import HeldOutSet
from rl_speed.data.orders import OracleOrder
from rl_speed.data.prompts import Prompt, PromptStream
from rl_speed.rollout.evaluate import evaluate
from rl_speed.training.held_out import HeldOut


class Oracle:
    """Tells `OracleOrder` what prompts are worth under the current policy, every few steps.

    Neither its samples nor its seconds are the run's. One that is stopped begins anew.

    Args:
      prompts: those of the order. held_out: whose program and verifier are used.
    """

    def __init__(
        self, data: Data, order: OracleOrder, prompts: Sequence[Prompt], held_out: HeldOut
    ):
        self._data, self._order, self._prompts = data, order, prompts
        self._held_out = held_out

    def due(self, step: int) -> bool:
        """Whether `step` begins with a measurement that was not made yet."""
        return step % self._data.oracle_every == 0 and self._order.at != step

    def measure(self, params: Any, step: int, stop: Callable[[], bool]) -> bool:
        """Measure; False where `stop` ended it."""
        samples = self._data.oracle_samples
        name, index = self._order.pool(self._data.oracle_prompts)
        asked = {name: HeldOutSet([self._prompts[i] for i in index], samples)}
        by = self._held_out
        found = evaluate(by.generator, params, asked, by.scorer.judge, by.room, stop=stop)
        if found is None:
            return False
        one = found.sets[name]
        self._order.learn(step, index, one.correct / samples, one.lengths)
        return True


def make_oracle(data: Data, stream: PromptStream, held_out: HeldOut) -> Oracle | None:
    """The one that a stream's order waits for, if it does."""
    if not isinstance(stream.order, OracleOrder):
        return None
    return Oracle(data, stream.order, stream.prompts, held_out)
