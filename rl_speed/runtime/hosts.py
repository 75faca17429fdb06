"""Agreement and fault handling between the processes of one run.

JAX's multi-controller runtime runs the same program in every process. Processes exchange values
that could differ between them: the values of all (`gather`), or that of process 0 (`first`). They
use the coordination service of `jax.distributed`, for small values only; samples and weights are
transferred between devices.

JAX's heartbeats find a dead process and end all others. A failing process notifies the others
before it ends (`alarm`), and they end with it. A thread in every process checks its progress: after
`hang_s` seconds without any, all processes end and report where each of them was.
"""

import contextlib
import faulthandler
import hashlib
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import jax
from flax import serialization

log = logging.getLogger(__name__)

# Exit status of a process that ends because another did: "try again" in sysexits.h.
ENDED_BY_OTHER = 75
# Exit status for invalid settings: a restart would not help.
BAD_SETTINGS = 2

HEARTBEAT_S = 100
HANG_S = 1800
# Seconds to wait for process 0 at the start.
START_S = 300
# Opening bytes of a gRPC (HTTP/2) client: the preface and an empty SETTINGS frame.
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_KEYS = "rl_speed"
# Seconds between two checks for alarms, and seconds that a process may take to end after one.
_LOOK_S = 1.0
_GRACE_S = 4.0


class OtherProcessError(RuntimeError):
    """Another process of the run failed, hangs, or runs another part of the program."""

    exit_status = ENDED_BY_OTHER


class DifferError(ValueError):
    """Processes were started with different settings, data or code."""

    exit_status = BAD_SETTINGS


class Hosts:
    """The processes of a run, with methods to agree and to report faults (see the module).

    Without `connect` there is one process, and every method returns at once.

    Args:
      client: client of the coordination service. index: of this process. count: number of
        processes.
      hang_s: seconds without progress after which all processes end.

    Attributes:
      writes: whether this process writes the files of the run. names: host and pid of each process.
      failed: whether this process has notified the others of its end.
    """

    def __init__(self, client: Any = None, index: int = 0, count: int = 1, hang_s: float = HANG_S):
        self.index = index
        self.count = count
        self.writes = index == 0
        self._client = client
        self._hang_s = hang_s
        self._serial = 0
        self._main = threading.main_thread()
        self._closed = threading.Event()
        self._ending = threading.Lock()
        self.failed = False
        self._barriers: Counter[str] = Counter()
        self._mark = (time.monotonic(), "the start")
        self._waits_for = ""
        mine = f"{socket.gethostname()}, pid {os.getpid()}"
        self.names = [] if count > 1 else [mine]
        if count > 1:
            self.names = self.gather(mine, "the start")
            threading.Thread(target=self._watch, name="hosts", daemon=True).start()

    def name(self, index: int) -> str:
        """Name of a process: "process 1 (node7, pid 4242)"."""
        return (
            f"process {index} ({self.names[index]})" if self.names[index:] else f"process {index}"
        )

    # Agreement.

    def gather(self, value: Any, what: str) -> list[Any]:
        """Returns the value of every process, by index. All must call it, in the same order.

        Args:
          value: nested dicts and lists of numbers, strings and numpy arrays. what: purpose of the
            value, for messages.

        Raises OtherProcessError if another process gathers for another purpose.
        """
        if self.count == 1:
            return [value]
        serial = self._serial
        self._serial = self._serial + 1
        place = f"{_KEYS}/{serial}"
        mine = {"for": what, "value": value}
        self.at(what)
        self._waits_for = what
        # Process 0 collects all values, so each process fetches one value, not N.
        if self.index == 0:
            others = [self._get(f"{place}/{index}") for index in range(1, self.count)]
            found = [mine, *map(serialization.msgpack_restore, others)]
            whole = serialization.msgpack_serialize({str(i): x for i, x in enumerate(found)})
            self._client.key_value_set_bytes(f"{place}/all", whole)
            if serial:
                # Every process that has given this value has read the ones before.
                self._client.key_value_delete(f"{_KEYS}/{serial - 1}/")
        else:
            self._client.key_value_set_bytes(
                f"{place}/{self.index}", serialization.msgpack_serialize(mine)
            )
            whole = serialization.msgpack_restore(self._get(f"{place}/all"))
            found = [whole[str(index)] for index in range(self.count)]
        self._waits_for = ""
        for index, theirs in enumerate(found):
            if theirs["for"] != what:
                raise OtherProcessError(
                    f"{self.name(index)} is at {theirs['for']}, and {self.name(self.index)} at "
                    f"{what}: they no longer run the same program in the same order"
                )
        self.at(f"what follows {what}")
        return [theirs["value"] for theirs in found]

    def first(self, value: Any, what: str) -> Any:
        """Returns the value of process 0, such as a time or a list of files."""
        return self.gather(value if self.index == 0 else None, what)[0]

    def meet(self, what: str) -> None:
        """Wait until all processes have reached this point."""
        self.gather(None, what)

    def require_same(self, values: dict[str, Any], advice: str) -> None:
        """Raises DifferError, which names the first entry that differs between processes.

        Args:
          advice: what to do; ends the message.
        """
        found = self.gather(values, "the comparison of settings")
        for index, theirs in enumerate(found):
            for name in {**found[0], **theirs}:
                if found[0].get(name) != theirs.get(name):
                    raise DifferError(
                        f"{name} is {found[0].get(name)!r} in {self.name(0)} and "
                        f"{theirs.get(name)!r} in {self.name(index)}; {advice}"
                    )

    def barrier(self, key: str, timeout_s: float, topic: str) -> None:
        """Wait until all processes have reached this barrier. Works in any thread, independently of
        `gather`.

        Args:
          key: name of the barrier. topic: barriers of one topic have the same order in every
            process.

        Raises OtherProcessError if another process is at another barrier of the topic, does not
        arrive within `timeout_s`, or has left a `note`.
        """
        if self.count == 1:
            return
        self._barriers[topic] += 1
        place = f"{_KEYS}/barrier/{topic}/{self._barriers[topic]}"
        # Numbers are masked, because each process has its own numbers for Orbax's barriers.
        key, end = re.sub(r"\d+", "#", key), time.monotonic() + timeout_s
        self._client.key_value_set(f"{place}/{self.index}", key)
        for index in range(self.count):
            while (theirs := self._look(f"{place}/{index}", 1000)) is None:
                if notes := self._client.key_value_dir_get(f"{_KEYS}/notes/{topic}"):
                    raise OtherProcessError(notes[0][1])
                if time.monotonic() > end:
                    raise OtherProcessError(
                        f"{self.name(index)} did not come to {key} in {timeout_s:g} s"
                    )
            if theirs != key:
                raise OtherProcessError(
                    f"{self.name(index)} is at {theirs}, {self.name(self.index)} at {key}: one of "
                    "them gave up"
                )

    def note(self, topic: str, text: str) -> None:
        """Leave an error text for processes that wait for this one at a `barrier` of the topic.

        Only the first note of a process on a topic is used.
        """
        if self.count > 1:
            with contextlib.suppress(Exception):
                text = f"{self.name(self.index)}: {text}"
                self._client.key_value_set(f"{_KEYS}/notes/{topic}/{self.index}", text)

    def _look(self, key: str, wait_ms: int) -> str | None:
        try:
            return self._client.blocking_key_value_get(key, wait_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None

    def _get(self, key: str) -> bytes:
        while True:
            try:
                return self._client.blocking_key_value_get_bytes(key, 10_000)
            except jax.errors.JaxRuntimeError as error:
                # Not there yet. The watch thread handles alarms and `hang_s`.
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise OtherProcessError(
                        f"{self.name(0)}, which coordinates, does not answer: {_line(error)}"
                    ) from None

    # Faults.

    def at(self, what: str) -> None:
        """Record that this process makes progress and is now at `what`."""
        self._mark = time.monotonic(), what

    def alarm(self, message: str, status: int) -> None:
        """Notify the other processes that this one ends, and why; they end, too."""
        if self.count == 1 or self.failed or self._closed.is_set():
            return
        self.failed = True
        text = f"{status} {self.name(self.index)}: {message}"
        with contextlib.suppress(Exception):  # the service may be gone
            self._client.key_value_set(f"{_KEYS}/alarm/{self.index}", text)

    def end(self, status: int) -> None:
        """Exit at once, because a normal exit would wait for processes that wait for this one. With
        a single process it does nothing.
        """
        if self.count == 1 or self._closed.is_set():
            return
        sys.stdout.flush()
        sys.stderr.flush()
        if self.index == 0:
            # Process 0 hosts the service: without it the others would not get the alarm.
            time.sleep(_LOOK_S + _GRACE_S + 1)
        os._exit(status)

    def close(self) -> None:
        """End normally, together with the others."""
        if self.count > 1 and not self._closed.is_set():
            self._closed.set()
            jax.distributed.shutdown()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            if self.failed:  # this process is already ending
                return
            try:
                alarms = [text for _, text in self._client.key_value_dir_get(f"{_KEYS}/alarm")]
            except Exception as error:  # noqa: BLE001 (the service raises many kinds)
                if not self._closed.wait(_GRACE_S):
                    self._leave(f"{self.name(0)}, which coordinates, is gone: {_line(error)}")
                return
            since, what = self._mark
            if alarms:
                status, text = alarms[0].split(" ", 1)
                # This process may be about to raise the same error, with a better message.
                if not self._closed.wait(_GRACE_S):
                    fatal = int(status) == BAD_SETTINGS
                    self._leave(text, BAD_SETTINGS if fatal else ENDED_BY_OTHER)
                return
            if time.monotonic() - since > self._hang_s:
                text = f"no progress for {self._hang_s:g} s at {what}; {self._where()}"
                self.alarm(text, ENDED_BY_OTHER)
                self._leave(f"{self.name(self.index)}: {text}", stacks=True)

    def _where(self) -> str:
        """Describe which process this one waits for, or which line of this package it runs."""
        if self._waits_for:
            missing = []
            for index in range(1, self.count):
                try:
                    self._client.key_value_try_get_bytes(f"{_KEYS}/{self._serial - 1}/{index}")
                except Exception:  # noqa: BLE001 (not there)
                    missing.append(self.name(index))
            if not missing and self.index:
                missing = [self.name(0)]
            return f"it waits for {' and '.join(missing) or 'nobody'}"
        frames = traceback.extract_stack(sys._current_frames()[self._main.ident])
        ours = [f for f in frames if "rl_speed" in f.filename] or frames
        return f"it is in {Path(ours[-1].filename).name}:{ours[-1].lineno}, {ours[-1].name}"

    def _leave(self, text: str, status: int = ENDED_BY_OTHER, stacks: bool = False) -> None:
        with self._ending:
            since, what = self._mark
            text = (
                f"{self.name(self.index)} ends, since {text}\n"
                f"({self.name(self.index)} was at {what} for {time.monotonic() - since:.0f} s; "
                f"{self._where()})"
            )
            log.error("%s", text)
            if stacks:
                faulthandler.dump_traceback(all_threads=True)
            self.end(status)


_HERE = Hosts()


def here() -> Hosts:
    """Returns the processes of this run."""
    return _HERE


def connect(
    coordinator: str = "",
    processes: int = 0,
    process: int = -1,
    cluster: bool = False,
    heartbeat_s: int = HEARTBEAT_S,
    hang_s: float = HANG_S,
) -> Hosts:
    """Join the other processes of the run, before JAX is used.

    Args:
      coordinator: "host:port" of process 0. processes: number of processes. process: index of this
        one.
      cluster: whether JAX finds these three by itself, as on a TPU pod; given values are kept.
      heartbeat_s: seconds without a heartbeat after which a process counts as dead, and all end.
      hang_s: see `Hosts`.

    Raises ValueError if the processes cannot connect.
    """
    global _HERE
    if coordinator:
        (_reach if process > 0 else _require_free)(coordinator)
    # The preemption service would handle SIGTERM; here `runtime.signals` does.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator or None,
            processes or None,
            None if process < 0 else process,
            cluster_detection_method=None if cluster else "deactivate",
            heartbeat_timeout_seconds=heartbeat_s,
        )
    except Exception as error:
        raise ValueError(
            f"the processes of the run could not connect ({_line(error)}). "
            + (
                "--cluster=auto found no TPU pod; give --coordinator, --processes and --process"
                if cluster
                else f"Start process 0 on the host of --coordinator={coordinator}, and one process "
                f"for each --process from 0 to {processes - 1}"
            )
        ) from error
    # jax.distributed has no public name for its client. This one is the same from JAX 0.10.2 to
    # 0.12.0.1, and Orbax reads it too.
    from jax._src import distributed

    state = distributed.global_state
    _HERE = Hosts(state.client, state.process_id, state.num_processes, hang_s)
    return _HERE


def _require_free(coordinator: str) -> None:
    """Raise ValueError if process 0 cannot listen at its port. JAX would end with a segmentation
    fault, or share the port with an unrelated run.
    """
    port = int(coordinator.rpartition(":")[2])
    try:
        # It sets SO_REUSEADDR, so an earlier run's closing connections do no harm.
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        socket.create_server(("", port), family=family, dualstack_ipv6=both).close()
    except OSError as error:
        raise ValueError(
            f"process 0 cannot listen at port {port} of --coordinator={coordinator} (or "
            f"$JAX_COORDINATOR_ADDRESS): {error.strerror}. Another program or an earlier run uses "
            "the port: end it, or give all processes another port"
        ) from None


def _reach(coordinator: str) -> None:
    """Wait until process 0 listens. Otherwise JAX would end this process without a useful message.

    Raises ValueError after `START_S` seconds, or if another program listens there.
    """
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + START_S
    answer = b""
    while not answer:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), 5) as it:
                it.sendall(_HTTP2)
                answer = it.recv(9)
        except OSError as error:
            problem = f"no answer within {START_S} s ({error})"
        else:
            # The fourth byte of a frame header is its type: a server begins with SETTINGS.
            if answer[3:4] == b"\x04":
                return
            problem = "another program listens there"
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    raise ValueError(
        f"process 0 is not at --coordinator={coordinator} (or $JAX_COORDINATOR_ADDRESS): "
        f"{problem}. Start process 0 on that host, with a port that is free there and that the "
        "other hosts can reach"
    )


def log_beside(hosts: Hosts, workdir: Path) -> None:
    """Log to logs/process_I.log in a process that does not write the run's files."""
    if hosts.writes:
        return
    path = workdir / "logs" / f"process_{hosts.index}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(path)
    except OSError as error:
        log.error("%s cannot write its log: %s", hosts.name(hosts.index), error)
        return
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def status_of(error: BaseException) -> int | None:
    """Exit status of a process that an error ends; None for an unexpected error."""
    expected = 2 if isinstance(error, (ValueError, OSError)) else None
    return getattr(error, "exit_status", expected)


def code_digest() -> str:
    """Hash of this package's modules: 16 hexadecimal digits."""
    whole = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        whole.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:16]


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)
