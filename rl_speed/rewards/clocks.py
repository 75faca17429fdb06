"""Processor time that a session's processes used, and time they waited for a processor."""

import dataclasses
import os
import pathlib

import psutil


@dataclasses.dataclass(frozen=True)
class Used:
    """Seconds of processor time that a session used, and seconds it waited for a processor (NaN if
    the system does not report this).
    """

    processor_s: float = 0.0
    queued_s: float = 0.0

    def __sub__(self, earlier):
        return Used(self.processor_s - earlier.processor_s, self.queued_s - earlier.queued_s)


def session_use(leader: int) -> Used:
    """Use of the session of process `leader`: its processes, and children they waited for."""
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
    """Seconds a process was ready to run but had no processor (Linux: /proc/PID/schedstat,
    nanoseconds).
    """
    try:
        return int(pathlib.Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return float("nan")
