"""The replay cache of RPO (replay of partial reasoning): one response per prompt, a prefix of which
starts the prompt's next samples; and how responses are stored, as flat arrays in a checkpoint, or
in a file that another run can start from.

Source: Yi et al., "replay of partial reasoning". `presets.rpo` lists differences between paper and
released code.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rl_speed.data.prompts import require_same_questions
from rl_speed.data.rollouts import Rollouts

# Version of the file format of `save_responses`; increase it when a field changes its meaning.
FORMAT = 1

# Fields of `CachedResponse` saved as arrays of one value per response, in this order, with dtypes.
FIELDS = {
    "version": np.int64,
    "reward": np.float64,
    "correct": np.bool_,
    "truncated": np.bool_,
    "logprob": np.float64,
    "shortest": np.int32,
}


@dataclasses.dataclass(frozen=True, eq=False)
class CachedResponse:
    """One response to a prompt, as it was sampled.

    Attributes:
      tokens: i32[n], n >= 1, read-only token ids. The last one is the end token unless the response
        is truncated.
      version: version of the policy that began it.
      reward: the trained reward. correct: the verifier's verdict. truncated: it ended by its token
        limit.
      logprob: summed log-prob of its sampled tokens under the policy that sampled them (prefix
        tokens count 0).
      shortest: tokens of the shortest response in its group.
    """

    tokens: np.ndarray
    version: int
    reward: float
    correct: bool
    truncated: bool
    logprob: float
    shortest: int

    def __post_init__(self):
        tokens = np.array(self.tokens, np.int32)  # a copy: a view would keep its whole group alive
        tokens.setflags(write=False)
        object.__setattr__(self, "tokens", tokens)


def pack_responses(held: Mapping[str, CachedResponse]) -> dict[str, Any]:
    """Packs responses by prompt id, in order, as flat arrays (none empty) and one JSON string."""
    if not held:
        return {}
    rows = list(held.values())
    return {
        "ids": json.dumps(list(held)),
        "lengths": np.array([len(r.tokens) for r in rows], np.int32),
        "tokens": np.concatenate([r.tokens for r in rows]),
        **{
            name: np.array([getattr(r, name) for r in rows], dtype)
            for name, dtype in FIELDS.items()
        },
    }


def unpack_responses(packed: Mapping[str, Any]) -> dict[str, CachedResponse]:
    """Inverse of `pack_responses`.

    Raises ValueError naming a field that is missing or does not fit the others.
    """
    if not packed:
        return {}
    if missing := [name for name in ("ids", "lengths", "tokens", *FIELDS) if name not in packed]:
        raise ValueError(f"field {missing[0]!r} is missing")
    ids = _json("ids", packed["ids"])
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        raise ValueError("field 'ids' must be a JSON list of strings")
    if len(set(ids)) != len(ids):
        raise ValueError("field 'ids' names a prompt twice")
    columns = {
        name: _column(name, packed[name], dtype, None if name == "tokens" else len(ids))
        for name, dtype in {"lengths": np.int32, "tokens": np.int32, **FIELDS}.items()
    }
    lengths = columns.pop("lengths")
    tokens = columns.pop("tokens")
    if lengths.min(initial=1) < 1 or int(lengths.sum(dtype=np.int64)) != len(tokens):
        raise ValueError(
            f"field 'lengths' must be 1 or more each and add up to the {len(tokens)} tokens"
        )
    for name, values, least in (("tokens", tokens, 0), ("shortest", columns["shortest"], 1)):
        if (smallest := values.min(initial=least)) < least:
            raise ValueError(f"field {name!r} holds {smallest}; it must be {least} or more")
    parts = np.split(tokens, np.cumsum(lengths, dtype=np.int64)[:-1])
    rows = zip(*(column.tolist() for column in columns.values()))
    return {name: CachedResponse(part, *row) for name, part, row in zip(ids, parts, rows)}


def _json(name: str, value: Any) -> Any:
    """Parses a field that holds JSON. Raises ValueError naming the field."""
    try:
        return json.loads(str(value))
    except json.JSONDecodeError as error:
        raise ValueError(f"field {name!r} is not JSON ({error})") from None


def _column(name: str, value: Any, dtype: type, length: int | None) -> np.ndarray:
    """Returns a field's values as `dtype`, without rounding or wrapping.

    Raises ValueError naming the field.
    """
    value = np.asarray(value)
    if value.ndim != 1 or (length is not None and len(value) != length):
        expected = "one axis" if length is None else f"[{length}], one value for each prompt id"
        raise ValueError(f"field {name!r} has shape {list(value.shape)}; it must have {expected}")
    if not np.can_cast(value.dtype, dtype, "same_kind"):
        raise ValueError(f"field {name!r} has type {value.dtype}; it must be {np.dtype(dtype)}")
    cast = value.astype(dtype)
    if not np.array_equal(cast, value, equal_nan=True):
        raise ValueError(f"field {name!r} holds a value that {np.dtype(dtype)} cannot hold")
    return cast


def save_responses(
    path: str | Path, held: Mapping[str, CachedResponse], about: Mapping[str, Any]
) -> None:
    """Writes responses by prompt id to one .npz file, atomically.

    `about`: JSON values that describe the file, such as the policy that sampled the responses.

    Raises OSError if the file cannot be written; an existing file then stays.
    """
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            # NumPy stores a string as an array without an axis: nothing is pickled.
            np.savez(
                file,
                format=np.int32(FORMAT),
                about=np.str_(json.dumps(dict(about))),
                **pack_responses(held),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def load_responses(
    path: str | Path, vocab_size: int | None = None
) -> tuple[dict[str, CachedResponse], dict[str, Any]]:
    """Reads a file written by `save_responses`. Returns (responses by prompt id, `about`).

    Raises:
      FileNotFoundError: the file does not exist.
      ValueError: the file is damaged or has another format, a field is missing or does not fit, or
        a token id is negative or not below `vocab_size`. Names the file and the fault.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            fields = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path}: there is no such file of cached responses; experiments/replay_cache.py "
            "writes one"
        ) from None
    # np.load raises many errors for damaged files: of zipfile, zlib and its own.
    except Exception as error:
        raise ValueError(
            f"{path}: not a file of cached responses, or a damaged one ({error}); write it anew "
            "with experiments/replay_cache.py"
        ) from None
    try:
        for name in ("format", "about"):
            if name not in fields:
                raise ValueError(f"field {name!r} is missing")
        if str(version := fields.pop("format")) != str(FORMAT):
            raise ValueError(
                f"field 'format' is {version}, and this version of the code reads {FORMAT}; write "
                "the file anew"
            )
        if not isinstance(about := _json("about", fields.pop("about")), dict):
            raise ValueError("field 'about' must be a JSON object")
        held = unpack_responses(fields)
        for name, response in held.items():
            if vocab_size is not None and (worst := int(response.tokens.max())) >= vocab_size:
                raise ValueError(
                    f"the response to prompt {name!r} has token id {worst}, but the vocabulary has "
                    f"only {vocab_size} ids. The file was made with another tokenizer: use one "
                    "made with the tokenizer of this policy"
                )
        return held, about
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


# RNG stream id of updates with (seed, visit). Not 0: NumPy pads seeds with zeros.
_UPDATE = 1


@dataclasses.dataclass(frozen=True)
class CacheReport:
    """Result of `ReplayCache.load`.

    Attributes:
      held: responses in the cache. unknown: responses left out because their prompt is unknown.
      missing: prompts without a response.
      about: the description in the file, such as the policy that sampled the responses.
    """

    held: int
    unknown: int
    missing: int
    about: dict[str, Any]


class ReplayCache:
    """Holds one response per prompt id.

    After every visit, trained on or rejected, a response of its group replaces the one of its
    prompt (Algorithm 1 updates the cache for all prompts). With probability `eps` it is the
    response of highest reward (ties, which the paper leaves open, are broken at random), otherwise
    a uniformly random other response of the group, if there is one. Draws are keyed by (seed, visit
    of the prompt), so they do not depend on the order or number of updates.

    Args:
      eps: in [0, 1]; 0.1 is the paper's best. None: `update` does nothing, as in the released code.
      only_correct: a wrong response never replaces a correct one.
      max_tokens: most tokens of all responses together; None: no bound. Above it, the responses
        that were updated longest ago are evicted and counted.
      seed: keys the draws.
    """

    def __init__(
        self,
        eps: float | None = 0.1,
        only_correct: bool = False,
        max_tokens: int | None = None,
        seed: int = 0,
    ):
        self.eps = eps
        self.only_correct = only_correct
        self.max_tokens = max_tokens
        self._seed = seed
        self._held: dict[str, CachedResponse] = {}  # updated longest ago first
        self.tokens = 0  # held, over all responses
        self._evicted = 0
        self._kept_right = 0

    def __len__(self) -> int:
        """Number of prompts with a response."""
        return len(self._held)

    def __contains__(self, prompt_id: str) -> bool:
        return prompt_id in self._held

    def get(self, prompt_id: str) -> CachedResponse | None:
        """Returns the cached response to the prompt, or None."""
        return self._held.get(prompt_id)

    def put(self, prompt_id: str, response: CachedResponse) -> None:
        """Stores the response, in place of the prompt's old one. A response longer than
        `max_tokens` is not stored, but counts as evicted; the old one stays.
        """
        if self.max_tokens is not None and len(response.tokens) > self.max_tokens:
            self._evicted += 1
            return
        self._remove(prompt_id)
        self._held[prompt_id] = response
        self.tokens += len(response.tokens)
        while self.max_tokens is not None and self.tokens > self.max_tokens:
            self._remove(next(iter(self._held)))
            self._evicted += 1

    def update(self, group: Rollouts) -> None:
        """Replaces the cached response to the group's prompt by a whole response of the group, as
        the class describes.

        Skips samples without tokens and samples that non-finite logits ended.

        Raises ValueError if the prompt has no visit number (below 0).
        """
        rows = np.flatnonzero((group.lengths > 0) & ~group.nonfinite)
        if self.eps is None or not rows.size:
            return
        if group.prompt.visit < 0:
            raise ValueError(
                f"prompt {group.prompt.id!r} has no visit number, which keys the draws of the "
                "replay cache: take prompts from a prompt stream"
            )
        take_best, uniform, other = np.random.default_rng(
            [self._seed, group.prompt.visit, _UPDATE]
        ).random(3)
        best = row = best_sample(group, rows, uniform)
        if take_best >= self.eps and len(rows) > 1:
            others = rows[rows != best]
            row = int(others[int(other * len(others))])
        held = self.get(group.prompt.id)
        length = group.lengths[row]
        if self.only_correct and held is not None and held.correct and not group.correct[row]:
            self._kept_right += 1
            return
        self.put(
            group.prompt.id,
            CachedResponse(
                tokens=group.tokens[row, :length],
                version=int(group.versions[row]),
                reward=float(group.rewards[row]),
                correct=bool(group.correct[row]),
                truncated=bool(group.truncated[row]),
                logprob=_summed_logprob(group, row),
                shortest=int(group.lengths[rows].min()),
            ),
        )

    def metrics(self, version: int) -> dict[str, float]:
        """Counts so far, and means over the cached responses (0 if there are none). Ages are
        measured at policy version `version`.
        """
        held = list(self._held.values())

        def mean(values):
            return float(np.mean(values)) if held else 0.0

        return {
            "replay/size": float(len(held)),
            "replay/tokens": float(self.tokens),
            "replay/evicted": float(self._evicted),
            "replay/kept_right": float(self._kept_right),
            "replay/age_mean": mean([version - r.version for r in held]),
            "replay/correct": mean([r.correct for r in held]),
            "replay/length": mean([len(r.tokens) for r in held]),
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns the whole state as numbers, strings and NumPy arrays, none of them empty."""
        return {
            "eps": self.eps,
            "only_correct": self.only_correct,
            "seed": self._seed,
            "evicted": self._evicted,
            "kept_right": self._kept_right,
            "responses": pack_responses(self._held),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replaces the contents by a saved state. Keeps this cache's `max_tokens`, and evicts
        responses beyond it.

        Raises ValueError: the saved cache had another eps, only_correct or seed.
        """
        mine = {"eps": self.eps, "only_correct": self.only_correct, "seed": self._seed}
        for name, value in mine.items():
            if state[name] != value:
                raise ValueError(
                    f"the saved replay cache has {name} {state[name]!r}, this one {value!r}: "
                    "resume with the settings of the saved run"
                )
        self._replace(
            unpack_responses(state["responses"]), int(state["evicted"]), int(state["kept_right"])
        )

    def save(self, path: str | Path, about: dict[str, Any] | None = None) -> None:
        """Writes the responses to a file that another run can start from; see `save_responses`."""
        save_responses(path, self._held, about or {})

    def load(
        self,
        path: str | Path,
        vocab_size: int | None = None,
        questions: Mapping[str, str] | None = None,
    ) -> CacheReport:
        """Replaces the contents by the responses of a file, sampled by this policy or another
        (appendix C). Keeps their policy versions.

        Args:
          vocab_size: token ids must be below this. questions: `data.prompts.question_digests` of
            the prompts whose responses are kept; None: all.

        Raises: the errors of `load_responses`; ValueError if the file tells other questions under
        these ids. The cache does not change then.
        """
        held, about = load_responses(path, vocab_size)
        if questions is not None:
            asked = {name: digest for name, digest in questions.items() if name in held}
            told = about.get("questions")
            require_same_questions(path, told if isinstance(told, dict) else {}, asked)
        ids = held.keys() if questions is None else set(questions)
        known = {name: response for name, response in held.items() if name in ids}
        self._replace(known, 0, 0)
        missing = len(ids - self._held.keys())
        return CacheReport(
            held=len(self), unknown=len(held) - len(known), missing=missing, about=about
        )

    def _replace(self, held: dict[str, CachedResponse], evicted: int, kept_right: int) -> None:
        self._held = {}
        self.tokens = 0
        self._evicted = evicted
        self._kept_right = kept_right
        for name, response in held.items():
            self.put(name, response)

    def _remove(self, prompt_id: str) -> None:
        if (old := self._held.pop(prompt_id, None)) is not None:
            self.tokens -= len(old.tokens)


def best_sample(group: Rollouts, rows: np.ndarray, uniform: float) -> int:
    """Returns the row of highest reward among samples `rows`; `uniform` in [0, 1) breaks ties."""
    # A NaN reward (of a policy that diverged) is never the highest.
    rewards = np.where(np.isnan(group.rewards[rows]), -np.inf, group.rewards[rows])
    best = rows[rewards == rewards.max()]
    return int(best[int(uniform * len(best))])


def _summed_logprob(group: Rollouts, row: int) -> float:
    # Leaves out padding: NumPy's sum would round differently with other padding.
    return float(group.logprobs[row, : group.lengths[row]].sum(dtype=np.float64))
