"""The embedded tasks: generated questions, each task with a small policy in this package.

Each row of `TASKS` is a task. `experiments/sft.py` trains its policy on its demonstrations.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from rl_speed.data import chain, scratchpad
from rl_speed.data.chain import ChainQuestion, to_prompt
from rl_speed.data.embedded_tokenizer import END, PAD, build_tokenizer, save_tokenizer
from rl_speed.data.prompts import Prompt

Encode = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True)
class EmbeddedTask:
    """A task: pure functions for its questions and demonstrations, and its settings.

    Attributes:
      name: the value of config.data.task.
      policy: the value of config.model.path; a folder of rl_speed/assets.
      vocabulary: the tokens; the first two are padding and end.
      max_prompt_tokens: length of the longest prompt.
      max_response_tokens: length of the longest response, with the end token.
      question: (split, seed, index) -> a question of an endless split.
      questions: (split, seed, size) -> that many distinct questions.
      demonstration: (seed, index, split) -> (question, response, whether an end token follows).
      verifier: the value of config.reward.verifier.
      shape: fields of `ModelConfig` for a new policy.
      updates: optimizer steps of the cold start.
      benchmarks: question classes with a held-out set each; (): all classes in one set.
    """

    name: str
    policy: str
    vocabulary: tuple[str, ...]
    max_prompt_tokens: int
    max_response_tokens: int
    question: Callable[[str, int, int], ChainQuestion]
    questions: Callable[[str, int, int], list[ChainQuestion]]
    demonstration: Callable[[int, int, str], tuple[str, str, bool]]
    verifier: str
    shape: Mapping[str, Any]
    updates: int
    benchmarks: tuple[str, ...] = ()

    def prompts(
        self, split: str, seed: int, size: int, encode: Encode, encode_answer: Encode
    ) -> list[Prompt]:
        """Returns `questions` as prompts; only `encode` applies the prompt template."""
        found = self.questions(split, seed, size)
        return [to_prompt(question, encode, encode_answer) for question in found]

    def build_tokenizer(self) -> Any:
        """Builds the task's transformers tokenizer."""
        return build_tokenizer(self.vocabulary, self.shape["max_position"])

    def save_tokenizer(self, directory: str | os.PathLike) -> None:
        """Writes the task's tokenizer into a directory (`embedded_tokenizer.save_tokenizer`)."""
        save_tokenizer(directory, self.build_tokenizer())

    def source(
        self, split: str, seed: int, encode: Encode, encode_answer: Encode
    ) -> Callable[[int], Prompt]:
        """Returns a function index -> Prompt of an endless split, for `PromptStream`."""
        return lambda index: to_prompt(self.question(split, seed, index), encode, encode_answer)


_TASKS = (
    EmbeddedTask(
        name="chain",
        policy="embedded",
        vocabulary=(PAD, END, *"0123456789", *chain.TABLES, chain.FILL, "="),
        max_prompt_tokens=chain.DEFAULT_SPEC.max_prompt_tokens,
        max_response_tokens=chain.DEFAULT_SPEC.max_response_tokens,
        question=functools.partial(chain.question, chain.DEFAULT_SPEC),
        questions=functools.partial(chain.questions, chain.DEFAULT_SPEC),
        demonstration=functools.partial(chain.demonstration, chain.DEFAULT_SPEC),
        verifier="exact",
        shape={"width": 64, "layers": 2, "mlp_width": 192, "max_position": 64},
        updates=2600,
    ),
    EmbeddedTask(
        name="scratchpad",
        policy="scratchpad",
        vocabulary=(
            *(PAD, END, *"0123456789", *scratchpad.OPERATORS),
            *(scratchpad.EQUALS, scratchpad.BACK, *scratchpad.LABELS),
        ),
        max_prompt_tokens=scratchpad.MAX_PROMPT_TOKENS,
        max_response_tokens=scratchpad.MAX_RESPONSE_TOKENS,
        question=scratchpad.question,
        questions=scratchpad.questions,
        demonstration=scratchpad.demonstration,
        verifier="scratchpad",
        shape={"width": 64, "layers": 3, "mlp_width": 192, "max_position": 128},
        updates=2000,
        benchmarks=tuple(scratchpad.LEVELS),
    ),
)
TASKS: Mapping[str, EmbeddedTask] = {task.name: task for task in _TASKS}
# Policy -> task.
POLICIES: Mapping[str, EmbeddedTask] = {task.policy: task for task in _TASKS}
