"""A pool of killable worker processes for scoring functions that may hang, crash or use up memory.

Signals cannot interrupt C code, and time limits by signals work only on the main thread. Here every
item runs in a process that the parent can kill. A failed item gets 0, is counted by cause, and does
not affect other items.

An item's limit is *processor* time, so its result does not depend on the machine's load. The worker
measures the time. If no reply comes, the parent reads the processor clocks of the worker's session,
children included, and kills the session. A wall-clock limit ends a sleeping item; waiting for a
processor is not sleep. If the cause of a failure may lie outside the item, the item runs once more,
alone, and the second result counts.

Workers are started as `python worker.py`. They are not forked (a JAX process must not fork), and
multiprocessing's spawn is not used (it runs the caller's main module again, with JAX).
"""

import collections
import concurrent.futures
import dataclasses
import math
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

from rl_speed.rewards.clocks import Used, session_use

CAUSES = ("ok", "timeout", "stalled", "crash", "memory", "exception")
UNGRADED = CAUSES[1:]  # causes of items without a value, whose reward is 0
# Default wall-clock limit, as a multiple of the processor-time limit.
STALL_FACTOR = 6
# After this multiple of its wall-clock limit an item is stopped even if it only waited for a
# processor; it runs once more.
_PATIENCE = 20

# A worker's reply about an item (worker.py).
_REPLY = ("value", "cause", "message", "used_s", "clocks", "haunted")
_WORKER = str(pathlib.Path(__file__).with_name("worker.py"))
_MAX_FAILED_STARTS = 3
# A worker ends itself this many seconds after `_PATIENCE` times its wall-clock limit.
_ALARM_S = 5.0
# The kernel counts process time in steps of 0.01 s. If the limit is exceeded by less than this,
# only the worker's own measurement counts.
_CLOCK_GRAIN_S = 0.02


@dataclasses.dataclass(eq=False)
class _Worker:
    """The parent's state of a worker, with times in seconds."""

    process: subprocess.Popen
    connection: Connection
    limit_s: float  # limit on processor time of its current work: its start, then an item
    stall_s: float  # limit on wall-clock time asleep
    started: float  # start of its current work, from time.monotonic()
    look: float  # when to read its clocks next; infinite when idle
    used: Used  # `session_use` when the current work began
    cold: bool  # no item has succeeded in this worker or was replayed at its start
    ready: bool = False
    item: int | None = None
    served: int = 0
    haunted: bool = False  # processes that earlier items started are alive


class WorkerPool:
    """Scores items in worker processes: `with WorkerPool("module:function", 4, 5.0) as pool`.

    The workers import the function with the caller's `sys.path` and working directory. The function
    gets an item's fields as arguments. It returns a number, (number, cause) to count the item under
    its own cause, or (number, cause, message) with a text for `replies`. All values are picklable
    builtins. An item may run more than once. Calls from several threads run one after the other.

    Attributes:
      counts: Counter of items by cause: "ok"; "timeout" (more processor time than the limit);
        "stalled" (slept longer than the wall-clock limit); "crash" (the worker died); "memory"
        (MemoryError under the limit); "exception" (another exception, or a value that is not
        finite); and the function's own causes. Items of the five causes after "ok" get 0. The key
        "retried" counts items that ran once more, alone.
      last_message: the latest message for each cause.
    """

    def __init__(
        self,
        function: str,
        workers: int,
        timeout_s: float,
        *,
        stall_s: float | None = None,
        memory_limit_mb: int | None = 1024,
        recycle_after: int | None = None,
        start_timeout_s: float = 60.0,
        warm_up: tuple[tuple[str, tuple], ...] = (),
        rehearsal: tuple | None = None,
    ):
        """Workers start at the first call, or at `start()`.

        Args:
          function: "module:function".
          workers: number of processes.
          timeout_s: seconds of processor time for one item and the processes it starts.
          stall_s: wall-clock seconds for which one item may sleep, neither computing nor waiting
            for a processor; None: `STALL_FACTOR` times `timeout_s`.
          memory_limit_mb: address space of one worker (RLIMIT_AS) in MiB; None: no limit.
          recycle_after: number of items after which a worker is replaced; None: never.
          start_timeout_s: seconds of processor time for a worker to import the function and run
            `warm_up` (and `STALL_FACTOR` times as many asleep).
          warm_up: ("module:function", arguments) that each worker calls once at its start.
          rehearsal: an item that each worker runs at its start, so that compilation and imports of
            a first call count in no item's time. None: new workers replay the first item that
            succeeded. Until one has, the first item of one worker at a time may use
            `start_timeout_s` more; after an item exceeds that, no item gets extra time.
        """
        if workers < 1 or not timeout_s > 0 or (recycle_after is not None and recycle_after < 1):
            raise ValueError(
                "workers and recycle_after must be at least 1 and timeout_s above 0; "
                f"got workers={workers}, recycle_after={recycle_after}, timeout_s={timeout_s}"
            )
        if stall_s is not None and not stall_s >= timeout_s:
            raise ValueError(
                "stall_s, wall-clock time, must not be below timeout_s, processor time; got "
                f"{stall_s} and {timeout_s}"
            )
        if ":" not in function:
            raise ValueError(f'function must be "module:function", got {function!r}')
        self.counts = collections.Counter(dict.fromkeys((*CAUSES, "retried"), 0))
        self.last_message: dict[str, str] = {}
        self._function = function
        # Users' modules are in the working directory. It is last in the search path, so its modules
        # do not hide installed ones.
        self._extra_path = os.getcwd()
        self._size = workers
        self._timeout_s = timeout_s
        self._stall_s = STALL_FACTOR * timeout_s if stall_s is None else stall_s
        self._memory_limit_mb = memory_limit_mb
        self._recycle_after = recycle_after
        self._start_timeout_s = start_timeout_s
        self._warm_up = warm_up
        self._known_good = rehearsal  # an item for new workers to replay
        self._head_start_s = start_timeout_s if rehearsal is None else 0.0  # extra time when cold
        self._wanted = 0  # workers to start; grows with the items of a call, up to `workers`
        self._failed_starts = 0
        self._closed = False
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        # Workers die with the thread that started them (worker.py), so this thread lives as long as
        # the pool.
        self._spawner = concurrent.futures.ThreadPoolExecutor(1, "rl_speed-workers")
        # Runs when the pool is collected and at interpreter exit, whichever comes first.
        self._finalizer = weakref.finalize(self, _stop_all, self._workers)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()

    def start(self):
        """Starts all workers and returns at once, before they are ready."""
        with self._lock:
            self._wanted = self._size
            self._fill()

    def close(self):
        """Ends the workers, after a call in progress. A second `close` does nothing."""
        with self._lock:
            self._closed = True
            self._finalizer()
            self._spawner.shutdown()

    def score(self, items) -> np.ndarray:
        """Returns the values of `items`, a list of R argument tuples, in order: f32[R]."""
        return self.score_detailed(items)[0]

    def score_detailed(self, items) -> tuple[np.ndarray, list[str]]:
        """Returns the values and causes of items: (f32[R], list of R strings).

        Raises:
          RuntimeError: the workers cannot start; the message has their error.
        """
        return self.replies(items)[:2]

    def replies(self, items) -> tuple[np.ndarray, list[str], list[str]]:
        """Returns values, causes and messages of items; a message is the function's own, or why it
        failed.
        """
        with self._lock:
            call = _Call(list(items))
            self._wanted = max(self._wanted, min(self._size, len(call.items)))
            try:
                while call.unscored:
                    self._fill()
                    self._assign(call)
                    self._wait(call)
                self._fill()  # replacements warm up during the caller's other work
            finally:
                # An interrupted call must leave no replies that the next call would read.
                for worker in [w for w in self._workers if w.item is not None]:
                    self._discard(worker)
        return call.values, call.causes, call.messages

    def _record(self, call, index, value, cause, message=""):
        call.unscored -= 1
        call.values[index] = value
        call.causes[index] = cause
        call.messages[index] = message
        self.counts[cause] += 1
        if message and cause != "ok":
            self.last_message[cause] = message

    def _fail(self, call, index, cause, message):
        self._record(call, index, 0.0, cause, message)

    def _excuse(self, call, index, cause, message):
        """Queues an item to run once more, alone; if it already did, records the failure."""
        if index in call.excused:
            self._fail(call, index, cause, message)
        else:
            call.excused.add(index)
            call.again.append(index)
            self.counts["retried"] += 1

    def _fill(self):
        if self._closed:
            raise RuntimeError("this pool is closed; make a new one")
        while len(self._workers) < self._wanted:
            self._workers.append(self._start_worker())

    def _start_worker(self):
        ours, theirs = Pipe(duplex=True)
        with theirs:
            process = self._spawner.submit(
                subprocess.Popen,
                # -P: the folder of worker.py must not shadow installed packages.
                [sys.executable, "-P", _WORKER, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # Its own group: Ctrl-C reaches only the parent, and a kill takes grandchildren too.
                start_new_session=True,
                # One thread each; fixed hashes, so sets iterate in the same order in every run.
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
            ).result()
            # This cannot fail if the child dies at once, because our copy of its end is still open.
            replay = [] if self._known_good is None else [(self._function, self._known_good)]
            ours.send(
                (
                    self._function,
                    [*sys.path, self._extra_path],
                    self._memory_limit_mb,
                    [*self._warm_up, *replay],
                )
            )
        now = time.monotonic()
        limit = self._start_timeout_s
        return _Worker(
            process,
            ours,
            limit,
            stall_s=STALL_FACTOR * limit,
            started=now,
            look=now + limit,
            used=Used(),
            cold=self._known_good is None,
        )

    def _assign(self, call):
        """Sends an item to every idle worker; replaces workers that reached `recycle_after`."""
        for worker in list(self._workers):
            if not worker.ready or worker.item is not None:
                continue
            if worker.cold and self._known_good is not None:
                self._rehearse(worker)
                continue
            if (
                self._head_start_s
                and worker.cold
                and any(w.cold and w.item is not None for w in self._workers)
            ):
                continue  # new workers may replay that item
            alone = not call.pending
            if alone and (not call.again or any(w.item is not None for w in self._workers)):
                return
            worn = self._recycle_after is not None and worker.served >= self._recycle_after
            if worn or (alone and worker.haunted):
                self._discard(worker)
                self._fill()
                continue
            queue = call.again if alone else call.pending
            if self._send(worker, call.items[queue[0]]):
                worker.item = queue.popleft()

    def _rehearse(self, worker):
        """Makes a worker that is still cold replay an item that has succeeded."""
        limit = self._start_timeout_s
        worker.ready = False
        worker.limit_s = limit
        worker.stall_s = STALL_FACTOR * limit
        worker.started = time.monotonic()
        worker.look = worker.started + limit
        try:
            worker.connection.send((_PATIENCE * worker.stall_s + _ALARM_S, self._known_good))
        except OSError:
            self._lost_idle(worker)

    def _send(self, worker, item) -> bool:
        """Sends the worker an item. Returns False if the worker died while idle."""
        worker.limit_s = self._timeout_s + (self._head_start_s if worker.cold else 0.0)
        worker.stall_s = self._stall_s
        try:
            worker.connection.send((_PATIENCE * self._stall_s + _ALARM_S, item))
        except OSError:
            self._lost_idle(worker)
            return False
        worker.started = time.monotonic()
        worker.look = worker.started + min(worker.limit_s, worker.stall_s)
        if worker.haunted:
            worker.used = session_use(worker.process.pid)
        return True

    def _wait(self, call):
        """Waits for a reply, a death or the time to read the clocks, and handles each."""
        by_connection = {worker.connection: worker for worker in self._workers}
        asked = time.monotonic()
        soonest = min((w.look for w in self._workers), default=asked)
        timeout = None if soonest == float("inf") else max(0.0, soonest - asked)
        for connection in wait(list(by_connection), timeout):
            self._receive(by_connection[connection], call)
        now = time.monotonic()
        # This process waited longer than its timeout: it or the host was suspended.
        late = timeout is not None and now - asked > timeout + self._stall_s / 2
        for worker in list(self._workers):
            # A reply that came while this process was busy still counts.
            if worker.look <= now and not worker.connection.poll():
                self._look(worker, call, late)

    def _look(self, worker, call, late):
        """Reads the worker's clocks and ends the worker if it exceeds a limit."""
        used = session_use(worker.process.pid) - worker.used
        wall = time.monotonic() - worker.started
        over = used.processor_s - worker.limit_s >= _CLOCK_GRAIN_S
        slept = wall - used.processor_s - used.queued_s
        unknown = math.isnan(used.queued_s)
        to_sleep = worker.stall_s - (wall if unknown else slept)
        if not over and to_sleep > 0 and wall < _PATIENCE * worker.stall_s:
            worker.look = time.monotonic() + max(
                _CLOCK_GRAIN_S, min(worker.limit_s - used.processor_s, to_sleep)
            )
            return
        index = worker.item
        haunted = worker.haunted
        if over:
            said = f"{used.processor_s:.3g} s of processor time; the limit is {worker.limit_s:g} s"
        else:
            busy = max(0.0, used.processor_s)
            said = f"{wall:.3g} s, of which it used the processor for {busy:.2g} s"
        said = f"killed after {said}"
        if index is None:
            self._lost_idle(worker, f"not ready: {said}")
            return
        self._discard(worker)
        if worker.cold:
            self._head_start_s = 0.0  # compilation alone does not take so long
        its_own = not haunted if over else not (late or unknown or to_sleep > 0)
        (self._fail if its_own else self._excuse)(
            call, index, "timeout" if over else "stalled", said
        )

    def _receive(self, worker, call):
        try:
            message = worker.connection.recv()
        except (EOFError, OSError):
            index = worker.item
            if index is None:
                self._lost_idle(worker)
                return
            code = self._discard(worker)
            if (
                code == -signal.SIGALRM
            ):  # the worker's own alarm: this process was suspended too long
                self._excuse(call, index, "stalled", "ended by its own alarm")
            elif code == -signal.SIGKILL:
                # The kernel (out of memory) or a user killed the worker, not this pool.
                self._excuse(call, index, "crash", "the worker was killed (SIGKILL)")
            else:
                self._fail(call, index, "crash", f"the worker ended with exit code {code}")
            return
        if not worker.ready:
            if len(message) == len(_REPLY):  # reply to a rehearsal
                worker.cold = False
                worker.haunted = message[-1]
                state = "ready"
                clocks = message[-2]
            else:
                state, detail, clocks = message
            if state == "failed":
                self._discard(worker)
                raise RuntimeError(f"a worker could not load {self._function}:\n{detail}")
            worker.ready = True
            worker.look = float("inf")
            worker.used = Used(*clocks)
            return
        value, cause, detail, used_s, clocks, haunted = message  # _REPLY
        index = worker.item
        worker.item = None
        worker.look = float("inf")
        cold = worker.cold
        was_haunted = worker.haunted
        worker.cold = False
        worker.haunted = haunted
        worker.used = Used(*clocks)
        worker.served += 1
        self._failed_starts = 0
        # The first item of a worker may have compiled something; it runs again without that.
        if used_s > self._timeout_s and cold:
            if self._send(worker, call.items[index]):
                worker.item = index
            else:
                call.pending.appendleft(index)
            return
        if cause == "memory":  # the failed item may still hold memory
            self._discard(worker)
        if used_s > self._timeout_s:
            fail = self._excuse if was_haunted else self._fail
            fail(
                call,
                index,
                "timeout",
                f"it used {used_s:.3g} s of processor time; the limit is {self._timeout_s:g} s",
            )
            return
        if self._known_good is None and cause == "ok":
            self._known_good = call.items[index]
        self._record(call, index, value, cause, detail)

    def _lost_idle(self, worker, why=""):
        """Handles the death of a worker without an item; after several in a row, RuntimeError."""
        code = self._discard(worker)
        self._known_good = None  # the replayed item may have ended the worker
        self._failed_starts += 1
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._failed_starts = 0
            raise RuntimeError(
                f"{_MAX_FAILED_STARTS} workers in a row for {self._function} ended before their "
                f"first item ({why or f'exit code {code}'}). If memory_limit_mb="
                f"{self._memory_limit_mb} is too small to import it, raise it"
            )

    def _discard(self, worker) -> int:
        self._workers.remove(worker)
        return _stop(worker)


class _Call:
    """The items of one call and their results so far."""

    def __init__(self, items):
        self.items = items
        self.values = np.zeros(len(items), np.float32)
        self.causes = [""] * len(items)
        self.messages = [""] * len(items)
        self.unscored = len(items)
        self.pending = collections.deque(range(len(items)))
        self.again: collections.deque[int] = collections.deque()  # to run once more, alone
        self.excused: set[int] = set()  # all items that were ever in `again`


def _stop(worker) -> int:
    """Kills the worker and its children; returns the worker's exit code."""
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
