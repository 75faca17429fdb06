"""A Python verifier inside the compiled loop: the program sends samples that just ended to the
host.

`HostVerify` describes the cost of a call. Prefer a JAX verifier where possible.
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

# XLA's CPU client copies arrays of 100 KiB and more for a callback on the threads that run the
# program. If all of them wait in a callback, none can copy, and the program hangs. The caller
# copies smaller arrays.
PIECE_BYTES = 64 * 1024


class VerifierError(RuntimeError):
    """The Python function of a `HostVerify` raised, or did not return rewards; the cause is
    attached.
    """


class HostVerify:
    """A Python function as a verifier of `sample_adaptive`; equal only to itself.

    Cost: about 0.5 ms a call on two CPU cores beside the function's own time; nothing decodes
    meanwhile. On the embedded task, with 256 slots and 35 ended samples a call, sampling takes 1.35
    times as long with exact match in NumPy as with exact match in JAX, and 6.4 times as long with
    math-verify in two workers, 11 ms a call (`experiments/bench.py verifiers`). It pays if decode
    steps are long compared with verification: large policies, long responses.

    Exactly-once: the function sees every sample that ends in the loop once, including samples of
    prompts that are not needed in the end. `io_callback` is neither dropped nor repeated, and a
    device's calls come in the order of its loop, whose next iteration needs their result. There is
    one call in each decode step in which a sample ends.

    Calls run one at a time, over all shards of a mesh, on threads of the runtime. The function must
    not call JAX, which would wait for the program that waits for it. It must limit its own time, as
    `rewards.MathVerifier` does; nothing else does.

    An error does not stop the program, because other shards would wait forever. Rewards are NaN
    from then on, which ends the loops, and the error is kept. `sample_adaptive`,
    `sample_adaptive_sharded` and the fused training step raise it when the program has ended.
    Callers that jit around them must call `raise_error` once the result is there.

    Needs one process, and `tensor` of size 1: JAX calls back only if all axes of the mesh are
    manual. JAX 0.10 does not keep programs with callbacks in the persistent compilation cache.

    Args:
      score: (tokens i32[n, T], lengths i32[n], answer: the pytree of NumPy arrays [n, ...]) -> n
        finite numbers. The n >= 1 rows are those that ended; tokens beyond the length are zero or
        stale.
      name: used in errors.

    Attributes:
      calls, rows, seconds: calls of the function, samples scored, seconds spent in it, since it was
        made.
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
        # On other backends the runtime copies on its own threads, and one array is cheaper than
        # many.
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
            except BaseException as error:  # also Ctrl-C, if the program runs on the main thread
                self._error = error
            finally:
                self.seconds += time.perf_counter() - begin
            return np.full(lengths.shape, np.nan, np.float32)

    def raise_error(self) -> None:
        """Raises the error since the last call, if any, as `VerifierError`."""
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
    """f32[count]. Raises ValueError or TypeError that describes a wrong result."""
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
    """The array itself, or flat pieces of at most `limit` bytes."""
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
            f"{jax.process_count()}: an error in one could not be told to the others, which would "
            "wait for ever. Use a JAX verifier"
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
            f"is {dict(mesh.shape)}: JAX calls back only where every mesh axis is manual, and "
            "these are the partitioner's. Use a JAX verifier (rewards.ExactMatch, "
            "rewards.IntegerMatch), or score on the host between calls"
        )


def raise_failure(verify: Any) -> None:
    """Raises the error of a host verifier after its program ended; does nothing for other
    verifiers.
    """
    if isinstance(verify, HostVerify):
        verify.raise_error()


def raising(sampler: Any) -> Any:
    """Wraps a jitted sampler with argument `verify`: errors of a host verifier are raised when it
    has ended.
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
