"""Parameter conventions of reward functions, and the arguments that a function gets.

`STYLES` has a row for each convention; README.md describes them. Standard library only, like all
modules that workers import.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

# Fields of a response. They are also the parameters of our own convention.
FIELDS = ("response", "answer", "question", "meta", "length", "ended")
# The key of `Prompt.meta` that holds the columns of the prompt's row, as published.
ROW = "row"
# Columns of a row that TRL does not pass on.
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")
# TRL's logging functions, which are made in the worker.
_LOGS = ("log_extra", "log_metric")


@dataclasses.dataclass(frozen=True)
class Style:
    """A convention for the parameters of reward functions.

    Attributes:
      label: name of the convention.
      names: parameter -> function (sample, chat) that returns its value.
      marks: a function with one of these parameters follows this convention; (): any of `names`.
      reads: parameter -> column of the row that its value comes from.
      batched: whether a function gets lists and returns one value per response.
      open: whether other parameters name columns of the row.
      absent: parameter of the convention that is not supported -> reason.
    """

    label: str
    names: Mapping[str, Callable[[Mapping[str, Any], bool], Any]]
    marks: tuple[str, ...] = ()
    reads: Mapping[str, str] = dataclasses.field(default_factory=dict)
    batched: bool = False
    open: bool = False
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _row(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    return sample["meta"].get(ROW, {})


def _field(name: str) -> Callable[[Mapping[str, Any], bool], Any]:
    def value(sample: Mapping[str, Any], chat: bool) -> Any:
        return sample[name]

    return value


def _ground_truth(sample: Mapping[str, Any], chat: bool) -> Any:
    """Returns the row's ground truth, as verl passes it; else the gold answer."""
    model = _row(sample).get("reward_model")
    known = isinstance(model, Mapping) and model.get("ground_truth") is not None
    return model["ground_truth"] if known else sample["answer"]


def _data_source(sample: Mapping[str, Any], chat: bool) -> Any:
    return _row(sample).get("data_source", "unknown")  # the name that verl uses in its metrics


def _extra_info(sample: Mapping[str, Any], chat: bool) -> Any:
    return _row(sample).get("extra_info") or {}


def _prompt(sample: Mapping[str, Any], chat: bool) -> Any:
    question = sample["question"]
    default = [{"role": "user", "content": question}] if chat else question
    return _row(sample).get("prompt") or default


def _completion(sample: Mapping[str, Any], chat: bool) -> Any:
    """Returns the response as text for a text prompt, as messages for a conversation."""
    prompt = _prompt(sample, chat)
    response = sample["response"]
    return [{"role": "assistant", "content": response}] if isinstance(prompt, list) else response


def _completion_ids(sample: Mapping[str, Any], chat: bool) -> list[int]:
    return [int(token) for token in sample.get("tokens", ())]


_VERL = {
    "data_source": _data_source,
    "solution_str": _field("response"),
    "ground_truth": _ground_truth,
    "extra_info": _extra_info,
}
_VERL_READS = {
    "data_source": "data_source",
    "ground_truth": "reward_model",
    "extra_info": "extra_info",
}
_OWN = {name: _field(name) for name in FIELDS}
# The first convention that fits a function's parameters applies; if none fits, the last.
STYLES = (
    Style(
        "TRL's, of a list",
        {"prompts": _prompt, "completions": _completion, "completion_ids": _completion_ids},
        batched=True,
        open=True,
        absent={
            "trainer_state": "rewards that change with the step could not be resumed exactly",
            "environments": "rewards read text; config.environment has the turns",
        },
    ),
    Style(
        "verl's, of a list",
        {f"{name}s": value for name, value in _VERL.items()},
        reads={f"{name}s": column for name, column in _VERL_READS.items()},
        batched=True,
    ),
    Style("verl's", _VERL, reads=_VERL_READS),
    Style(
        "ours, of a list",
        {name if name == "ended" else f"{name}s": value for name, value in _OWN.items()},
        marks=("responses", "answers", "questions", "metas", "lengths"),
        batched=True,
    ),
    Style("ours", _OWN),
)


@dataclasses.dataclass(frozen=True)
class Signature:
    """How a function is called.

    Attributes:
      style: label of the convention in `STYLES`.
      names: parameters that are passed.
      required: those of them without a default.
      anything: whether the function has **kwargs.
      asynchronous: whether the function is an `async def`.
    """

    style: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    anything: bool
    asynchronous: bool

    @property
    def convention(self) -> Style:
        """The convention in `STYLES`."""
        return next(style for style in STYLES if style.label == self.style)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns of a prompt's row that the function may read; None: all."""
        style = self.convention
        if not style.open:
            named = style.names if self.anything else self.names
            return tuple(style.reads[name] for name in named if name in style.reads)
        if self.anything:
            return None
        return ("prompt", *(name for name in self.names if name not in (*style.names, *_LOGS)))

    @property
    def reads_answer(self) -> bool:
        """Whether the function gets the gold answer."""
        golds = {"answer", "answers", "ground_truth", "ground_truths"}
        return bool(golds & set(self.names)) or (self.anything and not self.convention.open)

    def arguments(self, sample: Mapping[str, Any], chat: bool) -> dict[str, Any]:
        """Returns the arguments for one response by name; for a list function, one element of each.

        Args:
          sample: a response with `FIELDS`, and optionally "tokens".
          chat: whether a question is passed as a conversation if the row has no prompt.
        """
        style = self.convention
        known: dict[str, Any] = {}
        if style.open:
            # Defaults for columns that the row does not have.
            known = {
                "question": sample["question"],
                "answer": sample["answer"],
                "ground_truth": _ground_truth(sample, chat),
            }
            known |= {k: v for k, v in _row(sample).items() if k not in _NOT_COLUMNS}
        wanted = [n for n in style.names if self.anything or n in self.names]
        if not self.anything:
            known = {name: value for name, value in known.items() if name in self.names}
        return {**known, **{name: style.names[name](sample, chat) for name in wanted}}

    def lacks(self, arguments: Mapping[str, Any]) -> list[str]:
        """Returns the required parameters that are missing in these arguments."""
        return [n for n in self.required if n not in arguments and n not in _LOGS]


def signature_of(target: Callable[..., Any]) -> Signature:
    """Returns how to call a function, from the names of its parameters.

    Raises:
      ValueError: a parameter would get no value; the message has the parameter.
    """
    parameters = inspect.signature(target).parameters
    style = _style(parameters)
    names = []
    required = []
    anything = False
    for name, p in parameters.items():
        if p.kind is p.VAR_KEYWORD:
            anything = True
            continue
        by_name = p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)
        known = name in style.names or (style.open and name not in style.absent)
        if by_name and known:
            names.append(name)
            if p.default is p.empty:
                required.append(name)
        elif not by_name or p.default is p.empty:
            reason = f": {style.absent[name]}" if name in style.absent else ""
            what = [*style.names, *(["columns of the data"] if style.open else [])]
            raise ValueError(
                f"its parameter {name!r} would get no value{reason}; remove it or give it a "
                "default. Parameters of this convention: "
                f"{', '.join(what)}"
            )
    # `iscoroutinefunction` is False for an object with an `async def __call__`.
    asynchronous = inspect.iscoroutinefunction(target) or inspect.iscoroutinefunction(
        getattr(target, "__call__", None)  # noqa: B004
    )
    return Signature(style.label, tuple(names), tuple(required), anything, asynchronous)


def _style(parameters: Mapping[str, Any]) -> Style:
    for style in STYLES:
        if set(style.marks or style.names) & set(parameters):
            return style
    return STYLES[-1]
