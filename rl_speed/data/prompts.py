"""Prompts, and the stream that hands them out.

Only the stream makes `visit` numbers. Visit v is the v-th prompt that ever left it. With an
`EpochOrder`, (seed, v) determines the prompt, and the whole state is one counter and the returned
visits. Orders that depend on results have their own state, and the stream keeps the prompt of each
visit that is out.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl_speed.data.orders import AdaptiveOrder, EpochOrder, shuffled


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A question, encoded, with its gold answer.

    Attributes:
      id: name within its data set.
      tokens: i32[L], the question in its template, ready to sample from.
      answer: the gold answer, as text.
      answer_tokens: i32[A], the answer encoded, without an end token; empty if the verifier uses
        text.
      text: the question as written in the data.
      visit: number of its departure from the stream, -1 before; keys the randomness of its samples.
      meta: anything else (class, level, source), small and of plain Python types.
    """

    id: str
    tokens: np.ndarray
    answer: str
    answer_tokens: np.ndarray
    text: str
    visit: int = -1
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


def digest(prompts: Sequence[Prompt]) -> str:
    """Hash of the prompts' ids, tokens, answers and meta: 16 hexadecimal digits."""
    whole = hashlib.sha256()
    for p in prompts:
        # Users' verifiers read it.
        known = json.dumps(p.meta, sort_keys=True, default=str)
        whole.update(
            f"{p.id}\0{p.answer}\0{known}\0".encode()
            + np.asarray(p.tokens, np.int32).tobytes()
            + b"\1"
        )
    return whole.hexdigest()[:16]


class PromptStream:
    """Endless prompts: a finite data set in an order of `rl_speed.data.orders`, or an endless
    source in its own order.

    Args:
      source: a sequence of prompts, or a function index -> Prompt (endless).
      order: of a finite data set; None: a new shuffle for each epoch.

    Raises:
      ValueError: the data set is empty, or there is an order for an endless source.
    """

    def __init__(
        self,
        source: Sequence[Prompt] | Callable[[int], Prompt],
        seed: int = 0,
        order: EpochOrder | AdaptiveOrder | None = None,
    ):
        self._source = source
        self._size = None if callable(source) else len(source)
        if self._size == 0:
            raise ValueError("a prompt stream needs at least one prompt: the data set is empty")
        if self._size is None and order is not None:
            raise ValueError(
                f"the order {order.name!r} needs a finite data set, and this source is endless"
            )
        if self._size is not None and order is None:
            order = shuffled(self._size, seed)
        self._seed = seed
        self._order = order
        self._adaptive = None if isinstance(order, EpochOrder) else order
        self._serial = 0
        self._returned: list[int] = []
        self._permutations: dict[int, np.ndarray] = {}
        # Adaptive orders: prompts that were taken out and not yet observed, visit -> index.
        self._out: dict[int, int] = {}

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts: returned ones first, then fresh ones. Fewer if an order that depends
        on results has no more.
        """
        if n < 0:
            raise ValueError(f"cannot take {n} prompts")
        visits = self._returned[:n]
        self._returned = self._returned[n:]
        fresh = n - len(visits)
        if self._adaptive and fresh:
            out = np.zeros(self._size, bool)
            out[list(self._out.values())] = True
            index = self._adaptive.pick(fresh, self._serial, out).tolist()
            self._out.update(zip(range(self._serial, self._serial + len(index)), index))
            fresh = len(index)
        visits += range(self._serial, self._serial + fresh)
        self._serial += fresh
        return [self._at(visit) for visit in visits]

    def put_back(self, prompts: Sequence[Prompt]) -> None:
        """Returns prompts that were not sampled, or whose samples were discarded.

        They leave first next time, in order of visit, and keep their visit.

        Raises:
          ValueError: a prompt that this stream did not hand out, or that was already returned.
        """
        visits = [prompt.visit for prompt in prompts]
        for prompt in prompts:
            if not 0 <= prompt.visit < self._serial:
                raise ValueError(
                    f"prompt {prompt.id!r} with visit {prompt.visit} did not come from this "
                    f"stream, whose visits are 0 to {self._serial - 1}"
                )
        if len(set(visits + self._returned)) != len(visits) + len(self._returned):
            raise ValueError("a prompt was put back twice")
        if self._adaptive:
            self._check_out(prompts, "put back")
        self._returned = sorted(visits + self._returned)

    def observe(
        self,
        prompts: Sequence[Prompt],
        correct: Sequence[int],
        total: Sequence[int],
        tokens: Sequence[float] | None = None,
    ) -> None:
        """Reports finished prompts, each once: `correct` of `total` samples, with `tokens` sampled
        tokens on average (NaN or None if unknown). Only orders that depend on results use it.

        Raises:
          ValueError: with such an order, a prompt that is not out.
        """
        if not self._adaptive:
            return
        self._check_out(prompts, "observed")
        if back := set(self._returned).intersection(prompt.visit for prompt in prompts):
            raise ValueError(f"visits {sorted(back)} were observed, but had been put back")
        tokens = [np.nan] * len(prompts) if tokens is None else tokens
        index = [self._out.pop(prompt.visit) for prompt in prompts]
        self._adaptive.observe(index, correct, total, tokens)

    def _check_out(self, prompts: Sequence[Prompt], what: str) -> None:
        for prompt in prompts:
            if prompt.visit not in self._out:
                raise ValueError(
                    f"prompt {prompt.id!r} with visit {prompt.visit} was {what}, but is not out"
                )

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The finite data set, in its own order; empty for an endless source."""
        return () if self._size is None else self._source

    @property
    def order(self) -> EpochOrder | AdaptiveOrder | None:
        """The order of the finite data set."""
        return self._order

    def metrics(self) -> dict[str, float]:
        """Visits and epochs so far, returned prompts. With an order that depends on results also
        prompts that are out, and the order's metrics.
        """
        more = {} if self._size is None else {"prompts/epoch": self._serial / self._size}
        if self._adaptive:
            more |= {
                "prompts/out": float(len(self._out) - len(self._returned)),
                **self._adaptive.metrics(self._serial),
            }
        return {
            "prompts/visits": float(self._serial),
            "prompts/returned": float(len(self._returned)),
            **more,
        }

    def state_dict(self) -> dict[str, Any]:
        """All state of later draws: plain integers and strings; also arrays with an order that
        depends on results.
        """
        state = {
            "serial": self._serial,
            "returned": " ".join(map(str, self._returned)),
            "seed": self._seed,
            "size": -1 if self._size is None else self._size,
            "order": "source" if self._order is None else self._order.name,
            "data": self._digest,
        }
        if self._adaptive:
            state |= {
                "out": np.array(list(self._out.items()), np.int64).reshape(-1, 2),
                "of_order": self._adaptive.state_dict(),
            }
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
          ValueError: the state has another seed, order or data set (other prompts, or another order
            of them).
        """
        mine = self.state_dict()
        for name in ("seed", "size", "order", "data"):
            if state[name] != mine[name]:
                raise ValueError(
                    f"the saved prompt stream has {name} {state[name]}, this one {mine[name]}: the "
                    "same visits would be other prompts. Resume with the data, order and seed of "
                    "the saved run."
                )
        self._serial = int(state["serial"])
        self._returned = [int(visit) for visit in str(state["returned"]).split()]
        if self._adaptive:
            self._out = {
                int(visit): int(index) for visit, index in np.asarray(state["out"]).reshape(-1, 2)
            }
            self._adaptive.load_state_dict(state["of_order"])

    @functools.cached_property
    def _digest(self) -> str:
        return digest(self.prompts)

    def _at(self, visit: int) -> Prompt:
        if self._size is None:
            prompt = self._source(visit)
        elif self._adaptive:
            prompt = self._source[self._out[visit]]
        else:
            epoch, position = divmod(visit, self._size)
            prompt = self._source[int(self._permutation(epoch)[position])]
        return dataclasses.replace(prompt, visit=visit)

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            # Keep the current epoch and the one before it, for returned prompts.
            if len(self._permutations) > 1:
                del self._permutations[min(self._permutations)]
            self._permutations[epoch] = self._order.permutation(epoch)
        return self._permutations[epoch]
