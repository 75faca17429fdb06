"""Between prompts on the host and the compiled sampler: tables out, samples back, whatever the mesh."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from rl_speed.data.prompts import Prompt
from rl_speed.mesh import row_shards
from rl_speed.replay.cuts import Replay
from rl_speed.sampling import (Contexts, Decoder, Requests, Samples, SamplerConfig, build_contexts, build_requests,
                               sample_sharded)


@dataclasses.dataclass(frozen=True)
class Work:
    """Samples `first` to `first + count - 1` of a prompt's visit, from the prompt or from inside a response to it."""

    prompt: Prompt
    first: int
    count: int
    replay: Replay | None = None


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The samples of one `Work`, host arrays: tokens i32[n, T], logprobs f32[n, T], lengths i32[n], truncated bool[n].

    Responses are whole: the first `prefix`, i32[n], tokens (none by default) were replayed, with log-prob 0, the others sampled.
    The last was drawn at iteration `end_step`, i32[n], of the call's decode loop (0 where nobody noted it). Those that logits
    without a distribution ended are `nonfinite`, bool[n] (none by default; see `Samples`).
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    prefix: np.ndarray | None = None
    end_step: np.ndarray | None = None
    nonfinite: np.ndarray | None = None

    def __post_init__(self):
        for name, dtype in (("prefix", np.int32), ("end_step", np.int32), ("nonfinite", bool)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.zeros(len(self.lengths), dtype))

    def behind(self, replay: Replay) -> "Drawn":
        """These suffixes behind the prefixes that they continue, at the same width: the sampler allows no longer responses."""
        whole = Drawn(np.zeros_like(self.tokens), np.zeros_like(self.logprobs), self.lengths + replay.prefix, self.truncated,
                      np.asarray(replay.prefix, np.int32), self.end_step, self.nonfinite)
        for i, (start, end) in enumerate(zip(whole.prefix, whole.lengths)):
            whole.tokens[i, :start] = replay.tokens[:start]
            whole.tokens[i, start:end] = self.tokens[i, :end - start]
            whole.logprobs[i, start:end] = self.logprobs[i, :end - start]
        return whole


@dataclasses.dataclass
class GenerationStats:
    """What generation cost: calls, samples, tokens; decode steps (the longest shard's) and rows that decoded in them; of the
    samples, those that non-finite logits ended."""

    calls: int = 0
    samples: int = 0
    tokens: int = 0
    decode_steps: int = 0
    slot_steps: int = 0
    nonfinite: int = 0

    def __add__(self, other: "GenerationStats") -> "GenerationStats":
        return GenerationStats(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other))))


class Draw(Protocol):
    """A generation call that was dispatched: `result` blocks until its samples are on the host, one `Drawn` per work item."""

    def result(self) -> tuple[list[Drawn], GenerationStats]: ...


@dataclasses.dataclass(frozen=True)
class FinishedDraw:
    """A `Draw` whose samples are on the host already."""

    drawn: list[Drawn]
    stats: GenerationStats

    def result(self) -> tuple[list[Drawn], GenerationStats]:
        """What it was made of."""
        return self.drawn, self.stats


class PendingDraw:
    """A `Draw` under way on the devices.

    Args:
      samples: of the launch; every leaf has shards on axis 0. work: item i was dealt to shard i mod shards, in order.
    """

    def __init__(self, samples: Future[Samples], work: Sequence[Work]):
        self._samples, self._work = samples, work
        self._finished: FinishedDraw | None = None

    def result(self) -> tuple[list[Drawn], GenerationStats]:
        """Blocks the first time; raises what the launch raised."""
        if self._finished is None:
            self._finished = self._deal(jax.device_get(self._samples.result()))
            self._samples = None  # the devices need not hold them any longer
        return self._finished.result()

    def _deal(self, samples: Samples) -> FinishedDraw:
        shards = len(samples.lengths)
        drawn, next_row = [], [0] * shards
        for i, item in enumerate(self._work):
            shard = i % shards
            rows = slice(next_row[shard], next_row[shard] + item.count)
            next_row[shard] = rows.stop
            take = lambda x: x[shard, rows]
            mine = Drawn(take(samples.tokens), take(samples.logprobs), take(samples.lengths), take(samples.truncated),
                         end_step=take(samples.start_step) + take(samples.lengths), nonfinite=take(samples.nonfinite))
            drawn.append(mine if item.replay is None else mine.behind(item.replay))
        stats = GenerationStats(calls=1, samples=sum(w.count for w in self._work), tokens=int(samples.lengths.sum()),
                                decode_steps=int(samples.decode_steps.max()), slot_steps=int(samples.slot_steps.sum()),
                                nonfinite=int(samples.nonfinite.sum()))
        return FinishedDraw(drawn, stats)


def _context(work: Work) -> np.ndarray:
    return work.prompt.tokens if work.replay is None else np.concatenate([work.prompt.tokens, work.replay.tokens])


def _replayed(work: Work, name: str, otherwise: int) -> np.ndarray:
    return np.full(work.count, otherwise) if work.replay is None else np.asarray(getattr(work.replay, name))


class Generator:
    """`sample_sharded` with static capacities, fed with prompts.

    Args:
      decoder, config: the policy's functions and the sampler's settings; `config.slots` is per shard.
      mesh: prompts are dealt to its data x fsdp shards in turn.
      prompts: prompts that fit into one call, over all shards. samples: requests that fit into one call, likewise.
      per_prompt: most samples of one work item; a shard can be dealt so many more than the average.
      prompt_length: capacity of a prompt in tokens; with replayed responses, of both together.
      key: the typed root key of all randomness of this generator.
    """

    def __init__(self, decoder: Decoder, config: SamplerConfig, mesh: Mesh, prompts: int, samples: int, per_prompt: int,
                 prompt_length: int, key: jax.Array):
        self._decoder, self.config, self._mesh, self._key = decoder, config, mesh, key
        self.shards = row_shards(mesh)
        self._contexts = -(-prompts // self.shards) + (self.shards > 1)
        # Continuations are dealt before new prompts, and each of the two can leave a shard with one item more.
        self._requests = samples if self.shards == 1 else -(-samples // self.shards) + 2 * per_prompt
        self._prompt_length = prompt_length
        # One thread, so that calls run in the order of their dispatch. It is not the caller's: a loop whose length the data
        # decide can hold the thread that launched it until it ends (the host may have to look at its condition), and programs
        # that one thread launches on a CPU device wait for each other.
        self._launcher = ThreadPoolExecutor(1, "generation")

    def tables(self, work: Sequence[Work]) -> tuple[Contexts, Requests]:
        """The stacked tables of one call; work item i goes to shard i mod shards, in order.

        Raises ValueError when the work exceeds the capacities.
        """
        shards = []
        for shard in range(self.shards):
            mine = work[shard::self.shards]
            contexts = build_contexts([_context(w) for w in mine], self._contexts, self._prompt_length)
            repeat = lambda values: np.repeat(np.asarray(values, np.int64), [w.count for w in mine])
            of_samples = lambda values: np.concatenate([np.zeros(0, np.int64), *values])
            start = repeat([len(w.prompt.tokens) for w in mine]) + of_samples([_replayed(w, "prefix", 0) for w in mine])
            limit = of_samples([_replayed(w, "max_new", self.config.max_new) for w in mine])
            index = np.concatenate([np.arange(w.first, w.first + w.count) for w in mine]) if mine else np.zeros(0, int)
            requests = build_requests(repeat(range(len(mine))), repeat([w.prompt.visit for w in mine]), index, contexts,
                                      self._requests, limit, start, self.config)
            shards.append((contexts, requests))
        return jax.tree.map(lambda *leaves: np.stack(leaves), *shards)

    def lower(self, params: Any) -> jax.stages.Lowered:
        """The compiled call before compilation, for weights that may be abstract (with shardings): allocates nothing there."""
        contexts, requests = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.tables([]))
        key = jax.eval_shape(lambda: jax.random.key(0))
        return sample_sharded.lower(self._decoder, params, contexts, requests, key, self.config, self._mesh)

    @property
    def capacity(self) -> tuple[int, int]:
        """(prompts, samples) that one call can hold, over all shards."""
        return self._contexts * self.shards, self._requests * self.shards

    def dispatch(self, params: Any, work: Sequence[Work]) -> PendingDraw:
        """Begin to draw the samples of every work item, in one compiled call; does not wait for them.

        `params` must not be donated before the result is there: the launch may still be waiting for the call before.
        Raises ValueError when the work exceeds the capacities.
        """
        return PendingDraw(self._launcher.submit(sample_sharded, self._decoder, params, *self.tables(work), self._key,
                                                 self.config, self._mesh), list(work))

    def __call__(self, params: Any, work: Sequence[Work]) -> tuple[list[Drawn], GenerationStats]:
        """`dispatch`, and wait until the samples are on the host."""
        return self.dispatch(params, work).result()
