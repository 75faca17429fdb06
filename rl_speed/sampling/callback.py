"""A Python verifier inside the compiled loop: the program calls the host with samples that ended.

Prefer a JAX verifier where possible: `HostVerify` gives the cost of a call.
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

# Largest array passed to a callback on CPUs. XLA's CPU client copies arrays of 100 KiB and more on
# the threads that run the program; if all of these wait in a callback, the program hangs. The
# calling thread copies smaller arrays.
PIECE_BYTES = 64 * 1024


class VerifierError(RuntimeError):
    """Error of a `HostVerify` whose Python function raised, or did not return rewards. The cause is
    attached.
    """


class HostVerify:
    """Wraps a Python function as a verifier of `sample_adaptive`; equal only to itself.

    The function is called once in each decode step in which samples end, and scores every sample
    exactly once, including samples of prompts that are discarded later. Calls run one at a time
    over all shards of a mesh, on threads of the runtime. The function must not call JAX, which
    would deadlock, and must limit its own time, as `rewards.MathVerifier` does.

    After an error, all rewards are NaN, which ends the loops of all shards. `sample_adaptive`,
    `sample_adaptive_sharded` and the fused training step raise the error when the program has
    ended. Callers that jit around them must call `raise_error` when the result is ready.

    It needs one process, and `tensor` of size 1: JAX calls back only if all mesh axes are manual.
    JAX 0.10 does not store programs with callbacks in the persistent compilation cache.

    A call costs about 0.5 ms on two CPU cores, plus the function's time; nothing decodes meanwhile.
    On the embedded task, with 256 slots and 35 ended samples a call, sampling takes 1.35 times as
    long with exact match in NumPy as in JAX, and 6.4 times as long with math-verify in two workers,
    11 ms a call (`experiments/bench.py verifiers`). Its share falls as decode steps get longer.

    Args:
      score: (tokens i32[n, T], lengths i32[n], answer: pytree of NumPy arrays [n, ...]) -> n finite
        numbers, for the n >= 1 samples that ended. Tokens past the length are undefined.
      name: name in errors; by default the function's.

    Attributes:
      calls, rows, seconds: total calls of the function, samples scored, and seconds spent.
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
        """Traces the callback: rewards f32[S], 0 for rows of length 0, NaN after an error."""
        check_one_process()
        leaves, tree = jax.tree.flatten((tokens, lengths, answer))
        # On other backends the runtime copies on its own threads, and one large array is cheaper
        # than many pieces.
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
            except BaseException as error:  # including Ctrl-C, if this runs on the main thread
                self._error = error
            finally:
                self.seconds += time.perf_counter() - begin
            return np.full(lengths.shape, np.nan, np.float32)

    def raise_error(self) -> None:
        """Raises the error that occurred since the last call of this method, if any, as
        `VerifierError`; interrupts such as Ctrl-C as they are.
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
    """Returns a function's rewards as f32[count]. Raises ValueError or TypeError that describes a
    wrong result.
    """
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
    """Returns [x], or flat pieces of x of at most `limit` bytes."""
    size = math.prod(x.shape) * x.dtype.itemsize
    if limit is None or size <= limit:
        return [x]
    step = limit // x.dtype.itemsize
    flat = x.reshape(-1)
    return [flat[start : start + step] for start in range(0, flat.shape[0], step)]


def join(
    pieces: Sequence[Any], counts: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[np.ndarray]:
    """Restores the arrays from the pieces of `split`."""
    left = iter(pieces)

    def take(count):
        return [np.asarray(next(left)) for _ in range(count)]

    return [
        np.concatenate([p.reshape(-1) for p in take(count)]).reshape(shape)
        for count, shape in zip(counts, shapes)
    ]


def check_one_process() -> None:
    """Raises ValueError if several processes run the program."""
    if jax.process_count() > 1:
        raise ValueError(
            "a Python verifier inside the compiled loop runs in a single process, not in "
            f"{jax.process_count()}: after an error in one process the others would wait forever. "
            "Use a JAX verifier (rewards.ExactMatch, rewards.IntegerMatch)"
        )


def check_mesh(verify: Any, mesh: Mesh) -> None:
    """Raises ValueError for a `HostVerify` with several processes, or on a mesh with axes that the
    partitioner must handle.
    """
    if not isinstance(verify, HostVerify):
        return
    check_one_process()
    rest = {name: size for name, size in mesh.shape.items() if name not in ROWS and size > 1}
    if rest:
        raise ValueError(
            f"a Python verifier inside the compiled loop needs {', '.join(rest)}=1, but the mesh "
            f"is {dict(mesh.shape)}: JAX calls back only if every mesh axis is manual, and "
            "the partitioner handles these. Set them to 1, use a JAX verifier "
            "(rewards.ExactMatch, rewards.IntegerMatch), or score on the host between calls"
        )


def raise_failure(verify: Any) -> None:
    """Raises the error of a `HostVerify`, if any; does nothing for other verifiers."""
    if isinstance(verify, HostVerify):
        verify.raise_error()


def raising(sampler: Any) -> Any:
    """Wraps a jitted sampler that has an argument `verify`: it raises errors of a `HostVerify` when
    the program has ended.
    """
    place = list(inspect.signature(sampler).parameters).index("verify")

    @functools.wraps(sampler)
    def call(*args, **kwargs):
        result = sampler(*args, **kwargs)
        verify = args[place] if len(args) > place else kwargs["verify"]
        # Under another jit there is no result to wait for yet.
        if isinstance(verify, HostVerify) and not isinstance(
            jax.tree.leaves(result)[0], jax.core.Tracer
        ):
            jax.block_until_ready(result)
            verify.raise_error()
        return result

    return like_jitted(call, sampler)
