"""A pool of killable worker processes for scoring functions that may hang, crash or eat memory.

A grader of model output meets expressions that never return, some of them inside C code that no
signal interrupts, and time limits built on signals work on the main thread only (methods.md,
section 6). Here every item runs in a process that the parent can kill: what goes wrong costs that
item its reward, is counted by cause, and touches no other item.

Workers are started as `python worker.py`, not forked (a JAX process must not fork) and not
through multiprocessing's spawn (which runs the caller's main module again, JAX and all).
"""

import collections
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import weakref
from multiprocessing.connection import Connection, Pipe, wait

import numpy as np

CAUSES = ("ok", "timeout", "crash", "memory", "exception")

_WORKER = str(pathlib.Path(__file__).with_name("worker.py"))
_MAX_FAILED_STARTS = 3
# Past its limit by this many seconds, a worker whose parent is gone is ended by the kernel.
_BACKSTOP_S = 5.0


@dataclasses.dataclass(eq=False)
class _Worker:
    process: subprocess.Popen
    connection: Connection
    deadline: float  # of the start at first, then of the item; infinite when idle
    ready: bool = False
    item: int | None = None
    served: int = 0


class WorkerPool:
    """Scores items in worker processes: `with WorkerPool("module:function", 4, 5.0) as pool`.

    The function is imported by the workers, which get the caller's `sys.path` and working directory. It takes an item's
    fields as arguments and returns a number, or (number, cause) to have the item counted under a
    cause of its own choosing. Everything is picklable builtins. Its module should not import JAX.

    A call may come from any thread; calls from several threads take turns.

    Attributes:
      counts: Counter of items by cause since the pool was made. "ok"; "timeout" (the worker was
        killed at the limit); "crash" (the worker died); "memory" (MemoryError under the limit);
        "exception" (anything else raised, or a value that is not finite); and the function's own
        causes. All but "ok" and the function's own score 0.
      last_message: the latest detail seen for a cause, such as the text of the exception.
    """

    def __init__(
        self,
        function: str,
        workers: int,
        timeout_s: float,
        *,
        memory_limit_mb: int | None = 1024,
        recycle_after: int | None = None,
        start_timeout_s: float = 60.0,
        warm_up: tuple[tuple[str, tuple], ...] = (),
    ):
        """Starts nothing yet: workers start at the first call, or at `start()`.

        Args:
          function: "module:function".
          workers: the number of processes, at least 1.
          timeout_s: wall-clock seconds that one item may take.
          memory_limit_mb: address space of one worker (RLIMIT_AS) in MiB, or None for no limit.
          recycle_after: a worker is replaced after this many items; None for never.
          start_timeout_s: seconds that a worker may take to import the function, and for `warm_up`.
          warm_up: ("module:function", arguments) that each worker calls once when it starts, in no item's time.
        """
        if workers < 1 or timeout_s <= 0 or (recycle_after is not None and recycle_after < 1):
            raise ValueError(
                "workers and recycle_after must be at least 1 and timeout_s above 0; "
                f"got workers={workers}, recycle_after={recycle_after}, timeout_s={timeout_s}"
            )
        if ":" not in function:
            raise ValueError(f'function must be "module:function", got {function!r}')
        self.counts = collections.Counter(dict.fromkeys(CAUSES, 0))
        self.last_message: dict[str, str] = {}
        self._function = function
        # Modules of the user's lie where the program was started. Last, so that they hide nothing that is installed.
        self._extra_path = os.getcwd()
        self._size = workers
        self._timeout_s = timeout_s
        self._memory_limit_mb = memory_limit_mb
        self._recycle_after = recycle_after
        self._start_timeout_s = start_timeout_s
        self._warm_up = warm_up
        self._wanted = 0  # grows with the calls up to `workers`: ten items need no sixty workers
        self._failed_starts = 0
        self._closed = False
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        # Runs when the pool is collected and at interpreter exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def start(self):
        """Starts every worker now and returns at once, so that the first call finds them warm."""
        with self._lock:
            self._require_open()
            self._wanted = self._size
            self._fill()

    def close(self):
        """Ends the workers; waits for a call in progress. Closing twice is harmless."""
        with self._lock:
            self._closed = True
            self._finalizer()

    def score(self, items) -> np.ndarray:
        """Returns the values of `items`, a list of argument tuples, in order: f32[R]."""
        return self.score_detailed(items)[0]

    def score_detailed(self, items) -> tuple[np.ndarray, list[str]]:
        """As `score`, with each item's cause: (f32[R], list of R strings).

        Takes at most about (items / workers) * timeout_s plus the restarts of killed workers.
        Raises RuntimeError when workers cannot be started, with what they said.
        """
        items = list(items)
        values = np.zeros(len(items), np.float32)
        causes = [""] * len(items)
        unscored = len(items)

        def record(index, value, cause, message=""):
            nonlocal unscored
            unscored -= 1
            values[index] = value
            causes[index] = cause
            self.counts[cause] += 1
            if message:
                self.last_message[cause] = message

        with self._lock:
            self._require_open()
            self._wanted = max(self._wanted, min(self._size, len(items)))
            pending = collections.deque(range(len(items)))
            try:
                while unscored:
                    self._fill()
                    self._assign(items, pending)
                    self._wait(record)
                self._fill()  # replacements warm up while the caller is busy elsewhere
            finally:
                # An interrupted call must leave no replies behind for the next one to read.
                for worker in [w for w in self._workers if w.item is not None]:
                    self._discard(worker)
        return values, causes

    def _require_open(self):
        if self._closed:
            raise RuntimeError("this pool is closed")

    def _fill(self):
        while len(self._workers) < self._wanted:
            self._workers.append(self._start_worker())

    def _start_worker(self):
        ours, theirs = Pipe(duplex=True)
        with theirs:
            process = subprocess.Popen(
                # -P: the folder of worker.py must not shadow installed packages.
                [sys.executable, "-P", _WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Its own group: Ctrl-C stays with the parent, and a kill takes grandchildren too.
                start_new_session=True,
                # One thread each, and sets that iterate in the same order in every run.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            )
            # While our copy of their end is open, this cannot fail should the child die at once.
            ours.send(
                (self._function, [*sys.path, self._extra_path], self._memory_limit_mb, self._timeout_s + _BACKSTOP_S, self._warm_up)
            )
        return _Worker(process, ours, time.monotonic() + self._start_timeout_s)

    def _assign(self, items, pending):
        """Gives every idle worker an item; retires those that have served their share."""
        for worker in list(self._workers):
            if not pending or not worker.ready or worker.item is not None:
                continue
            if self._recycle_after is not None and worker.served >= self._recycle_after:
                self._discard(worker)
                self._fill()
                continue
            try:
                worker.connection.send(items[pending[0]])
            except OSError:  # it died while idle; the item was not at fault and stays pending
                self._lost_idle(worker)
                continue
            worker.item = pending.popleft()
            worker.deadline = time.monotonic() + self._timeout_s

    def _wait(self, record):
        """Sleeps until a reply, a death or a deadline, and deals with each."""
        by_connection = {worker.connection: worker for worker in self._workers}
        soonest = min((w.deadline for w in self._workers), default=time.monotonic())
        timeout = None if soonest == float("inf") else max(0.0, soonest - time.monotonic())
        for connection in wait(list(by_connection), timeout):
            self._receive(by_connection[connection], record)
        for worker in list(self._workers):
            # A reply that came while this process was busy elsewhere still counts.
            if worker.deadline > time.monotonic() or worker.connection.poll():
                continue
            if worker.item is None:
                self._lost_idle(worker, f"not ready within {self._start_timeout_s:g} s")
                continue
            index = worker.item
            self._discard(worker)
            record(index, 0.0, "timeout", f"killed after {self._timeout_s:g} s")

    def _receive(self, worker, record):
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            index = worker.item
            if index is None:
                self._lost_idle(worker)
                return
            code = self._discard(worker)
            if code == -signal.SIGALRM:  # the backstop: this process was away past the deadline
                record(index, 0.0, "timeout", f"ended by its own alarm, {self._timeout_s:g} s")
            else:
                record(index, 0.0, "crash", f"the worker ended with exit code {code}")
            return
        if not worker.ready:
            state, detail = message
            if state == "failed":
                self._discard(worker)
                raise RuntimeError(f"a worker could not load {self._function}:\n{detail}")
            worker.ready, worker.deadline = True, float("inf")
            return
        value, cause, detail = message
        index, worker.item, worker.deadline = worker.item, None, float("inf")
        worker.served += 1
        self._failed_starts = 0
        if cause == "memory":  # what the failed item still holds would starve the next
            self._discard(worker)
        record(index, value, cause, detail)

    def _lost_idle(self, worker, why=""):
        """A worker is gone that had no item: harmless once, a broken set-up when it goes on."""
        code = self._discard(worker)
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._failed_starts = 0
            raise RuntimeError(
                f"{_MAX_FAILED_STARTS} workers in a row for {self._function} ended before their "
                f"first item ({why or f'exit code {code}'}). Is memory_limit_mb="
                f"{self._memory_limit_mb} enough to import it?"
            )

    def _discard(self, worker) -> int:
        self._workers.remove(worker)
        return _stop(worker)


def _stop(worker) -> int:
    """Kills the worker and its children and returns its exit code (its own, if it was dead)."""
    try:
        os.killpg(worker.process.pid, signal.SIGKILL)
    except ProcessLookupError:  # already dead and reaped
        worker.process.poll()
    code = worker.process.wait()
    worker.connection.close()
    return code


def _stop_all(workers):
    while workers:
        _stop(workers.pop())
