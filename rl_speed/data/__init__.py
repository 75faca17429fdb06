"""Loads data sets and embedded tasks, and streams their prompts. The package does not import the
policy; encoders are arguments.
"""

from rl_speed.data.chain import DEFAULT_SPEC
from rl_speed.data.loaders import (
    DataError,
    Fields,
    LoadReport,
    Row,
    load_prompts,
    load_rows,
    load_training_rows,
    rows_to_prompts,
)
from rl_speed.data.orders import EpochOrder, VisitOrder, easy_to_hard
from rl_speed.data.prompts import Prompt, PromptStream
from rl_speed.data.rollouts import Rollouts
from rl_speed.data.tasks import TASKS

__all__ = [
    "DEFAULT_SPEC",
    "DataError",
    "EpochOrder",
    "Fields",
    "LoadReport",
    "Prompt",
    "PromptStream",
    "Rollouts",
    "Row",
    "TASKS",
    "VisitOrder",
    "easy_to_hard",
    "load_prompts",
    "load_rows",
    "load_training_rows",
    "rows_to_prompts",
]
