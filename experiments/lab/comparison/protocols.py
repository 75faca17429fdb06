"""How each paper compares its method with others. A method says how samples are chosen and what is
optimized; a protocol says how many optimizer steps an RL step has, which methods are run, and what
is charged as time.
"""

import copy
import dataclasses
from collections.abc import Callable

from rl_speed.config import Config, methods, presets


@dataclasses.dataclass(frozen=True)
class Protocol:
    """A way of comparing.

    Attributes:
      says: in a sentence, for the first line of tables.
      methods: what is run by default, as `runs.Variant` takes it.
      adjust: what every run has besides its method's own fields.
      ratio: seconds of inference to those of an update, for as many samples: what the modelled time
        T charges (`Run.curve`). The SPEED paper's 2, where no other is known.
    """

    says: str
    methods: tuple[str, ...]
    adjust: Callable[[Config], object] = lambda config: None
    ratio: float = 2.0

    def settings(self, of_method: methods.OfMethod) -> methods.OfMethod:
        """`of_method` with what the protocol changes."""

        def adjusted(name: str) -> Config:
            config = copy.deepcopy(of_method(name))
            self.adjust(config)
            return config

        return adjusted


def _released_steps_as_given(config: Config) -> None:
    """SPEED's released update, but for the number of optimizer steps."""
    steps = config.training.minibatches
    presets.as_released_by_speed(config)
    config.training.minibatches = steps


def _once_or_six_times(*names: str) -> tuple[str, ...]:
    return tuple(f"{n}@training.minibatches={k}" for n in names for k in (1, 6))


_SPEED = ("rloo", "speed_rloo", "dapo", "speed_dapo")
PROTOCOLS = {
    "speed_released": Protocol(
        "SPEED's released code (run_fast_rloo_7b.sh, run_rloo_7b.sh): rule.n / rule.n_init "
        "optimizer steps an RL step where prompts are screened, 1 elsewhere; clipped loss on "
        "recomputed log-probs",
        _SPEED,
        presets.as_released_by_speed,
    ),
    "speed_equal_steps": Protocol(
        "SPEED and its baselines with 1 and with 6 optimizer steps an RL step each, the loss of "
        "the released code",
        _once_or_six_times(*_SPEED),
        _released_steps_as_given,
    ),
}
