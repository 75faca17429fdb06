"""Measures the processor time of a session's processes, and their time waiting for a processor."""

import dataclasses
import os
import pathlib

import psutil


@dataclasses.dataclass(frozen=True)
class Used:
    """Time that a session used.

    Attributes:
      processor_s: processor time in seconds.
      queued_s: seconds waiting for a processor; NaN if the system does not report it.
    """

    processor_s: float = 0.0
    queued_s: float = 0.0

    def __sub__(self, earlier):
        return Used(self.processor_s - earlier.processor_s, self.queued_s - earlier.queued_s)


def session_use(leader: int) -> Used:
    """Returns the use of a session's processes and of children they waited for.

    Args:
      leader: process id of the session leader.
    """
    processor_s = queued_s = 0.0
    for pid in psutil.pids():
        try:
            if os.getsid(pid) != leader:
                continue
            times = psutil.Process(pid).cpu_times()
            processor_s += times.user + times.system + times.children_user + times.children_system
            queued_s += waited_s(pid)
        except (ProcessLookupError, PermissionError, psutil.Error):
            # It has ended, or belongs to another user.
            continue
    return Used(processor_s, queued_s)


def waited_s(pid: int) -> float:
    """Returns the seconds that a process was ready to run but had no processor; NaN if unknown.

    Source: /proc/PID/schedstat of Linux, in nanoseconds.
    """
    try:
        return int(pathlib.Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return float("nan")
