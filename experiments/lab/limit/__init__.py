"""What choosing prompts can gain: predicted with a policy that is a table, and measured."""

from lab.limit.report import compare
from lab.limit.tabular import (
    Choice,
    Curve,
    Questions,
    fit_rate,
    pass_rates,
    questions_of,
    sample,
    table,
    train,
)

__all__ = [
    "Choice",
    "Curve",
    "Questions",
    "compare",
    "fit_rate",
    "pass_rates",
    "questions_of",
    "sample",
    "table",
    "train",
]
