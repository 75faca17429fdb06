"""A Python verifier inside the compiled loop: the program calls back to the host for the samples
that just ended.

What a call costs is told at `HostVerify`. Whoever can write the verifier as a JAX function should.
"""

import functools
import inspect
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh

from rl_speed.mesh import ROWS
from rl_speed.sampling.contract import like_jitted

# XLA's CPU client copies arrays of 100 KiB and more to a callback on the very threads that run the
# program. Where every one of them waits in a callback, nobody is left to copy, and the program
# hangs; smaller arrays are copied by the caller.
PIECE_BYTES = 64 * 1024


class VerifierError(RuntimeError):
    """The Python function of a `HostVerify` raised, or returned what cannot be rewards;
    the cause is attached.
    """


class HostVerify:
    """A Python function as a verifier of `sample_adaptive`; equal to itself alone.

    Cost: about 0.5 ms a call on two CPU cores beside the function's own time, and nothing is
    decoded meanwhile. On the embedded task, with 256 slots and 35 ended samples a call, the sampler
    takes 1.35 times as long with exact match in NumPy as with the same in JAX, and 6.4 times as
    long with math-verify in two workers, 11 ms a call (`experiments/bench.py verifiers`).
    It pays where decode steps are long beside judging what ends in them: with large policies and
    long responses.

    Exactly-once: the function sees every sample that ends in the loop once, samples whose prompt
    turns out not to be needed included. `io_callback` may be neither dropped nor repeated, and the
    calls of one device come in the order of its loop, whose next iteration needs their result. One
    call a decode step in which anything ended.

    Calls take turns, shards of a mesh included, on threads of the runtime. The function must not
    call JAX: it would wait for the program that waits for it. It should bound its own time, as
    `rewards.MathVerifier` does; nothing else does.

    Where it raises, the program is not stopped from outside, since other shards would wait for
    ever: rewards are NaN from there on, which ends the loops, and the error is kept.
    `sample_adaptive`, `sample_adaptive_sharded` and the fused training step raise it once the
    program is done; whoever jits around them calls `raise_error` after the result is there.

    Needs one process, and `tensor` of size 1: JAX calls back only where all axes of the mesh are
    manual. With JAX 0.10 programs that call back are not kept in the persistent compilation cache.

    Args:
      score: (tokens i32[n, T], lengths i32[n], answer: the pytree of NumPy arrays [n, ...]) -> n
        finite numbers. Rows are those that ended, n at least 1; tokens beyond the length are
        zero or stale.
      name: what errors call it.

    Attributes:
      calls, rows, seconds: calls of the function, samples judged, seconds spent in it, since
        it was made.
    """

    def __init__(
        self, score: Callable[[np.ndarray, np.ndarray, Any], Any], name: str | None = None
    ):
        self.score = score
        self.name = name or getattr(score, "__qualname__", type(score).__qualname__)
        self.calls = 0
        self.rows = 0
        self.seconds = 0.0
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    def __call__(self, tokens: jax.Array, lengths: jax.Array, answer: Any) -> jax.Array:
        """The callback, traced: f32[S], 0 for rows of length 0, NaN after an error."""
        check_one_process()
        leaves, tree = jax.tree.flatten((tokens, lengths, answer))
        # Elsewhere the runtime has its own threads for copies, and one is cheaper than many.
        limit = PIECE_BYTES if jax.default_backend() == "cpu" else None
        pieces = [split(leaf, limit) for leaf in leaves]
        counts = [len(p) for p in pieces]
        shapes = [leaf.shape for leaf in leaves]
        judge = functools.partial(
            self._judge, lambda flat: jax.tree.unflatten(tree, join(flat, counts, shapes))
        )
        return io_callback(
            judge, jax.ShapeDtypeStruct(lengths.shape, jnp.float32), *(x for p in pieces for x in p)
        )

    def _judge(self, restore: Callable[[Sequence[Any]], Any], *pieces: Any) -> np.ndarray:
        with self._lock:
            begin = time.perf_counter()
            try:
                tokens, lengths, answer = restore(pieces)
                rows = np.flatnonzero(lengths > 0)
                rewards = np.zeros(lengths.shape, np.float32)
                if self._error is None:
                    if rows.size:
                        self.calls = self.calls + 1
                        self.rows = self.rows + rows.size
                        ended = jax.tree.map(lambda x: x[rows], (tokens, lengths, answer))
                        rewards[rows] = check_rewards(self.score(*ended), rows.size)
                    return rewards
            except BaseException as error:  # Ctrl-C too, where the program runs on the main thread
                self._error = error
            finally:
                self.seconds += time.perf_counter() - begin
            return np.full(lengths.shape, np.nan, np.float32)

    def raise_error(self) -> None:
        """Raise what the function raised since the last time, as `VerifierError`;
        nothing where it did not.
        """
        error = self._error
        self._error = None
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is not None:
            raise VerifierError(
                f"the verifier {self.name} failed inside the compiled loop: "
                f"{type(error).__name__}: {error}"
            ) from error


def check_rewards(rewards: Any, count: int) -> np.ndarray:
    """f32[count]. Raises ValueError or TypeError, telling what came instead."""
    rewards = np.asarray(rewards)
    if rewards.dtype.kind not in "biuf":
        raise TypeError(f"it must return {count} numbers, got an array of dtype {rewards.dtype}")
    if rewards.shape != (count,):
        raise ValueError(
            f"it must return one reward for each of the {count} samples, got shape {rewards.shape}"
        )
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards[~np.isfinite(rewards)][0]}")
    return rewards.astype(np.float32)


def split(x: jax.Array, limit: int | None) -> list[jax.Array]:
    """The array as it is, or flat pieces of at most `limit` bytes."""
    size = math.prod(x.shape) * x.dtype.itemsize
    if limit is None or size <= limit:
        return [x]
    step = limit // x.dtype.itemsize
    flat = x.reshape(-1)
    return [flat[start : start + step] for start in range(0, flat.shape[0], step)]


def join(
    pieces: Sequence[Any], counts: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """The arrays that `split` took apart."""
    left = iter(pieces)

    def take(count):
        return [np.asarray(next(left)) for _ in range(count)]

    return [
        np.concatenate([p.reshape(-1) for p in take(count)]).reshape(shape)
        for count, shape in zip(counts, shapes)
    ]


def check_one_process() -> None:
    """Raises ValueError where the program is one of several processes'."""
    if jax.process_count() > 1:
        raise ValueError(
            "a Python verifier inside the compiled loop runs in a single process, not in "
            f"{jax.process_count()}: an error in one could not be told to the others, which would "
            "wait for ever. Use a JAX verifier"
        )


def check_mesh(verify: Any, mesh: Mesh) -> None:
    """Raises ValueError: a `HostVerify` on a mesh with an axis that must stay with the partitioner,
    or with several processes.
    """
    if not isinstance(verify, HostVerify):
        return
    check_one_process()
    rest = {name: size for name, size in mesh.shape.items() if name not in ROWS and size > 1}
    if rest:
        raise ValueError(
            f"a Python verifier inside the compiled loop needs {', '.join(rest)}=1, but the mesh "
            f"is {dict(mesh.shape)}: JAX calls back only where every mesh axis is manual, and "
            "these are the partitioner's. Use a JAX verifier (rewards.ExactMatch, "
            "rewards.IntegerMatch), or score on the host between calls"
        )


def raise_failure(verify: Any) -> None:
    """Raise what a host verifier raised inside a program that is done;
    nothing for other verifiers.
    """
    if isinstance(verify, HostVerify):
        verify.raise_error()


def raising(sampler: Any) -> Any:
    """The jitted sampler with argument `verify`, which raises, once it is done,
    what a host verifier raised inside it.
    """
    place = list(inspect.signature(sampler).parameters).index("verify")

    @functools.wraps(sampler)
    def call(*args, **kwargs):
        result = sampler(*args, **kwargs)
        verify = args[place] if len(args) > place else kwargs["verify"]
        # Under another jit there is nothing to wait for yet.
        if isinstance(verify, HostVerify) and not isinstance(
            jax.tree.leaves(result)[0], jax.core.Tracer
        ):
            jax.block_until_ready(result)
            verify.raise_error()
        return result

    return like_jitted(call, sampler)
