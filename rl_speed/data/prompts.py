"""Prompts, and the stream that hands them out.

The stream is the only source of `visit` numbers. Visit v is the v-th prompt that ever left it, so (seed, v) determines
which prompt that was: its epoch is v // size, its place in that epoch's shuffle v % size. All state is therefore one
counter and the visits that were handed back.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A question, encoded, with what its answers are checked against.

    Attributes:
      id: name within its data set.
      tokens: i32[L], the question in its template, ready to sample from.
      answer: the right answer, as text.
      answer_tokens: i32[A], the answer encoded, without an end token; empty where the verifier works on text.
      text: the question as written in the data.
      visit: serial number of its departure from the stream, -1 before; it keys the randomness of its samples.
      meta: anything else (class, level, source), small and of plain Python types.
    """

    id: str
    tokens: np.ndarray
    answer: str
    answer_tokens: np.ndarray
    text: str
    visit: int = -1
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


class PromptStream:
    """Endless prompts: a new shuffle of a finite data set each epoch, or an unbounded source in order.

    Args:
      source: a sequence of prompts, or a function index -> Prompt (endless).
      seed: of the shuffles.
      shuffle: False keeps a finite data set in its own order in every epoch.

    Raises:
      ValueError: the data set is empty.
    """

    def __init__(self, source: Sequence[Prompt] | Callable[[int], Prompt], seed: int = 0, shuffle: bool = True):
        self._source = source
        self._size = None if callable(source) else len(source)
        if self._size == 0:
            raise ValueError("a prompt stream needs at least one prompt: the data set is empty")
        self._seed, self._shuffle = seed, shuffle
        self._serial = 0
        self._returned: list[int] = []
        self._orders: dict[int, np.ndarray] = {}

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts: those handed back first (with their old visit), then fresh ones."""
        if n < 0:
            raise ValueError(f"cannot take {n} prompts")
        visits, self._returned = self._returned[:n], self._returned[n:]
        fresh = n - len(visits)
        visits += range(self._serial, self._serial + fresh)
        self._serial += fresh
        return [self._at(visit) for visit in visits]

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Returns prompts of which nothing was sampled, or whose samples were discarded. They leave first next time, in
        order of visit, and keep the visit they have: the same policy then gives them the very same samples.

        Raises:
          ValueError: a prompt that this stream did not hand out, or that was returned already.
        """
        visits = [prompt.visit for prompt in prompts]
        for prompt in prompts:
            if not 0 <= prompt.visit < self._serial:
                raise ValueError(f"prompt {prompt.id!r} with visit {prompt.visit} did not come from this stream, whose"
                                 f" visits are 0 to {self._serial - 1}")
        if len(set(visits + self._returned)) != len(visits) + len(self._returned):
            raise ValueError("a prompt was put back twice")
        self._returned = sorted(visits + self._returned)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The finite data set, in its own order; empty for an endless source."""
        return () if self._size is None else self._source

    @property
    def epoch(self) -> int:
        """Epoch of the next fresh prompt, from 0; always 0 for an endless source."""
        return 0 if self._size is None else self._serial // self._size

    def metrics(self) -> dict[str, float]:
        """Visits so far, epochs so far (with fraction; absent for an endless source), prompts waiting to go again."""
        epochs = {} if self._size is None else {"prompts/epoch": self._serial / self._size}
        return {"prompts/visits": float(self._serial), "prompts/returned": float(len(self._returned)), **epochs}

    def state_dict(self) -> dict[str, Any]:
        """All that the next draws depend on, as plain integers and one string."""
        return {"serial": self._serial, "returned": " ".join(map(str, self._returned)), "seed": self._seed,
                "size": -1 if self._size is None else self._size, "shuffle": int(self._shuffle)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the state was taken.

        Raises:
          ValueError: the state belongs to a stream with another seed, shuffle or data set size.
        """
        mine = self.state_dict()
        for name in ("seed", "size", "shuffle"):
            if int(state[name]) != mine[name]:
                raise ValueError(f"the saved prompt stream has {name} {int(state[name])}, this one {mine[name]}: the same"
                                 " visits would be other prompts. Resume with the data and seed of the saved run.")
        self._serial = int(state["serial"])
        self._returned = [int(visit) for visit in str(state["returned"]).split()]

    def _at(self, visit: int) -> Prompt:
        if self._size is None:
            prompt = self._source(visit)
        else:
            epoch, position = divmod(visit, self._size)
            prompt = self._source[int(self._order(epoch)[position]) if self._shuffle else position]
        return dataclasses.replace(prompt, visit=visit)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # the current epoch and the one before it, for what was handed back
                del self._orders[min(self._orders)]
            self._orders[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self._size)
        return self._orders[epoch]
