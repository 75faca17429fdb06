"""A group: one prompt and all samples that were drawn for one visit of it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_speed.data.prompts import Prompt

# Values of Group.phases: whether a sample was asked for while its prompt was screened, or after it was accepted.
SCREEN, CONTINUE = 0, 1

# Per-sample fields and their dtypes, in the order they are saved. The first two are ragged: one row, `lengths` long.
TOKEN_FIELDS = {"tokens": np.int32, "logprobs": np.float32}
SAMPLE_FIELDS = {"lengths": np.int32, "rewards": np.float32, "versions": np.int32, "phases": np.int32,
                 "sample_index": np.int32, "truncated": np.bool_, "correct": np.bool_, "estimates": np.float32, "prefix": np.int32,
                 "nonfinite": np.bool_}


@dataclasses.dataclass(eq=False)
class Group:
    """R samples of one prompt, response tokens padded on the right to T.

    Attributes:
      prompt: with the visit whose samples these are.
      tokens: i32[R, T], the end token included, zero beyond the length.
      lengths: i32[R], response tokens, a replayed prefix included.
      logprobs: f32[R, T], what the policy that sampled each token gave it; zero beyond the length, and on a replayed prefix.
      rewards: f32[R].
      versions: i32[R], number of policy updates made when the sample was drawn.
      phases: i32[R], SCREEN or CONTINUE (a tag of the request; it cannot be told from the counts).
      sample_index: i32[R], with the visit, the sample's key.
      truncated: bool[R], ended by its token limit.
      correct: bool[R], what the verifier said, before any shaping of the reward; by default rewards above 0.5.
      estimates: f32[R], pass rate of the prompt as estimated before the visit; NaN, the default, where nobody estimates.
      prefix: i32[R], tokens at the start of the response that were replayed, not sampled; 0 by default.
      nonfinite: bool[R], ended by logits that leave no distribution; none by default. Counted as wrong, and never trained on.

    Raises:
      ValueError: shapes that disagree, or a length outside [0, T].
    """

    prompt: Prompt
    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    rewards: np.ndarray
    versions: np.ndarray
    phases: np.ndarray
    sample_index: np.ndarray
    truncated: np.ndarray
    correct: np.ndarray | None = None
    estimates: np.ndarray | None = None
    prefix: np.ndarray | None = None
    nonfinite: np.ndarray | None = None

    def __post_init__(self):
        if self.correct is None:
            self.correct = np.asarray(self.rewards) > 0.5
        if self.estimates is None:
            self.estimates = np.full(len(self.lengths), np.nan)
        if self.prefix is None:
            self.prefix = np.zeros(len(self.lengths))
        if self.nonfinite is None:
            self.nonfinite = np.zeros(len(self.lengths))
        for name, dtype in {**TOKEN_FIELDS, **SAMPLE_FIELDS}.items():
            setattr(self, name, np.asarray(getattr(self, name), dtype))
        if self.tokens.ndim != 2 or self.logprobs.shape != self.tokens.shape:
            raise ValueError(f"group of prompt {self.prompt.id!r}: tokens and logprobs must share one shape [R, T], got"
                             f" {self.tokens.shape} and {self.logprobs.shape}")
        for name in SAMPLE_FIELDS:
            if getattr(self, name).shape != self.tokens.shape[:1]:
                raise ValueError(f"group of prompt {self.prompt.id!r}: {name} must have shape {self.tokens.shape[:1]}, got"
                                 f" {getattr(self, name).shape}")
        if len(self) and not (0 <= self.lengths.min() and self.lengths.max() <= self.tokens.shape[1]):
            raise ValueError(f"group of prompt {self.prompt.id!r}: lengths must lie in [0, {self.tokens.shape[1]}]")
        if len(self) and not (0 <= self.prefix.min() and (self.prefix <= self.lengths).all()):
            raise ValueError(f"group of prompt {self.prompt.id!r}: a replayed prefix must lie in [0, length of its response]")

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among the samples."""
        return int(self.versions.min())

    @property
    def sampled_tokens(self) -> int:
        """Tokens of all responses that were drawn, not replayed."""
        return int((self.lengths - self.prefix).sum())

    def take(self, rows: np.ndarray) -> "Group":
        """The samples at `rows`, in that order."""
        return Group(prompt=self.prompt, **{name: getattr(self, name)[rows] for name in (*TOKEN_FIELDS, *SAMPLE_FIELDS)})

    def finite(self) -> "Group":
        """Without the samples that non-finite logits ended."""
        return self.take(np.flatnonzero(~self.nonfinite)) if self.nonfinite.any() else self

    def merge(self, other: "Group") -> "Group":
        """This group's samples followed by the other's, of the same visit (screening, then continuation)."""
        if other.prompt.visit != self.prompt.visit:
            raise ValueError(f"cannot merge samples of visits {self.prompt.visit} and {other.prompt.visit}")
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        ragged = {name: np.concatenate([_widen(getattr(g, name), width) for g in (self, other)]) for name in TOKEN_FIELDS}
        flat = {name: np.concatenate([getattr(self, name), getattr(other, name)]) for name in SAMPLE_FIELDS}
        return Group(prompt=self.prompt, **ragged, **flat)


def _widen(x_RxT: np.ndarray, width: int) -> np.ndarray:
    return np.pad(x_RxT, ((0, 0), (0, width - x_RxT.shape[1])))


def pack(groups: list[Group]) -> dict[str, Any]:
    """Groups as flat arrays with offsets, for a checkpoint: no ragged lists, no padding, no empty arrays.

    Prompts' text fields travel as one JSON string.
    """
    if not groups:
        return {}
    packed: dict[str, Any] = {
        "group_sizes": np.array([len(g) for g in groups], np.int32),
        "widths": np.array([g.tokens.shape[1] for g in groups], np.int32),
        **pack_prompts([g.prompt for g in groups]),
    }
    for name in SAMPLE_FIELDS:
        packed[name] = np.concatenate([getattr(g, name) for g in groups])
    for name in TOKEN_FIELDS:
        packed[name] = np.concatenate([getattr(g, name)[_valid(g)] for g in groups])
    return packed


def unpack(packed: dict[str, Any]) -> list[Group]:
    """The inverse of `pack`."""
    if not packed:
        return []
    sizes, widths = np.asarray(packed["group_sizes"]), np.asarray(packed["widths"])
    # What was saved before a field existed gets its default.
    flat = {name: np.split(np.asarray(packed[name]), np.cumsum(sizes)[:-1]) for name in SAMPLE_FIELDS if name in packed}
    tokens_in_group = [int(lengths.sum()) for lengths in flat["lengths"]]
    ragged = {name: np.split(np.asarray(packed[name]), np.cumsum(tokens_in_group)[:-1]) for name in TOKEN_FIELDS}
    groups = []
    for i, prompt in enumerate(unpack_prompts(packed)):
        fields = {field: values[i] for field, values in flat.items()}
        valid = np.arange(widths[i]) < fields["lengths"][:, None]
        for field, dtype in TOKEN_FIELDS.items():
            fields[field] = np.zeros(valid.shape, dtype)
            fields[field][valid] = ragged[field][i]
        groups.append(Group(prompt=prompt, **fields))
    return groups


def pack_prompts(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Prompts, one at least, as flat arrays and one JSON string."""
    return {
        "visits": np.array([p.visit for p in prompts], np.int64),
        # Two rows a prompt, its tokens and its answer's, in one array, since answers may all be empty.
        "prompt_lengths": np.array([[len(p.tokens), len(p.answer_tokens)] for p in prompts], np.int32),
        "prompt_tokens": np.concatenate([np.concatenate([p.tokens, p.answer_tokens]) for p in prompts]),
        "prompt_texts": json.dumps([[p.id, p.text, p.answer, p.meta] for p in prompts]),
    }


def unpack_prompts(packed: Mapping[str, Any]) -> list[Prompt]:
    """The inverse of `pack_prompts`."""
    lengths = np.asarray(packed["prompt_lengths"])
    rows = np.split(np.asarray(packed["prompt_tokens"]), np.cumsum(lengths.ravel())[:-1])
    return [Prompt(id=name, tokens=rows[2 * i], answer=answer, answer_tokens=rows[2 * i + 1], text=text,
                   visit=int(packed["visits"][i]), meta=meta)
            for i, (name, text, answer, meta) in enumerate(json.loads(packed["prompt_texts"]))]


def _valid(group: Group) -> np.ndarray:
    return np.arange(group.tokens.shape[1]) < group.lengths[:, None]
