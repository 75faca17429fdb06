"""SIGTERM and SIGINT ask a run to save and stop; it says so and does.

At scale a step takes minutes, and whoever sends a signal waits for less; so the request is looked
at between generation calls too, of steps and of evaluations, and between parts of a call. What is
saved then has the samples of whole calls.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from rl_speed.runtime.hosts import Hosts

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopped(Exception):
    """The run was asked to stop, and did after saving.

    Attributes:
      signal: which. step: steps made, all saved. workdir: where. inside: how much of what comes
        next is made and saved, too. receiver: of several processes, the one that got it.
    """

    def __init__(
        self,
        received: signal.Signals,
        step: int,
        workdir: object,
        inside: str = "",
        receiver: str = "",
    ):
        self.signal = received
        self.step = step
        self.workdir = workdir
        self.inside = inside
        after = f"step {step} and {inside}" if inside else f"step {step}"
        to = f" to {receiver}" if receiver else ""
        super().__init__(
            f"stopped by {received.name}{to} after {after}, saved in {workdir}: the same "
            "command goes on from there"
        )

    @property
    def exit_status(self) -> int:
        """128 plus the signal's number, as shells report it."""
        return 128 + int(self.signal)


class StopRequest:
    """Whether a signal has asked for a stop, or the time is over. `received` is None until then.

    Several processes stop together, whichever of them got the signal: what `ask` found last is the
    answer until the next `ask`, which all must make at the same places.

    Args:
      over: asked by `ask`; True is as if SIGALRM had come, the signal of a clock that ran out.

    Attributes:
      receiver: of several processes, the one that got it.
    """

    def __init__(self, hosts: Hosts | None = None, over: Callable[[], bool] = lambda: False):
        self._hosts = hosts or Hosts()
        self.receiver = ""
        self._over = over
        self._mine: signal.Signals | None = None
        self._agreed: signal.Signals | None = None

    @property
    def received(self) -> signal.Signals | None:
        return self._mine if self._hosts.count == 1 else self._agreed

    def note(self, received: signal.Signals) -> None:
        """This process got a signal."""
        self._mine = received

    def ask(self) -> bool:
        """Whether any process got a signal, or its time is over."""
        if self._mine is None and self._over():
            self._mine = signal.SIGALRM
        if self._hosts.count > 1:
            found = self._hosts.gather(int(self._mine or 0), "whether to stop")
            if any(found) and self._agreed is None:
                index = next(i for i, number in enumerate(found) if number)
                self._agreed, self.receiver = (
                    signal.Signals(found[index]),
                    self._hosts.name(index),
                )
        return bool(self)

    def __bool__(self) -> bool:
        return self.received is not None


@contextlib.contextmanager
def stop_on_signals(
    hosts: Hosts | None = None, over: Callable[[], bool] = lambda: False
) -> Iterator[StopRequest]:
    """Within, the first SIGTERM or SIGINT is noted, not obeyed; a second one acts at once,
    as it would have without us.

    Off the main thread, where Python allows no handlers, nothing is installed and no signal is
    ever noted.

    Args:
      hosts: the processes that stop together; None: this one.
      over: as of `StopRequest`.
    """
    request = StopRequest(hosts, over)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {which: signal.getsignal(which) for which in SIGNALS}

    def restore() -> None:
        for which, handler in before.items():
            # None: installed outside Python; the default is the nearest we can put back.
            signal.signal(which, signal.SIG_DFL if handler is None else handler)

    def handle(number: int, _) -> None:
        request.note(signal.Signals(number))
        restore()
        # os.write and not print: a handler may interrupt a print.
        note = (
            f"\n{signal.Signals(number).name}: stopping and saving as soon as what is under way "
            "ends; again to stop at once\n"
        )
        os.write(sys.__stderr__.fileno(), note.encode())

    for which in SIGNALS:
        signal.signal(which, handle)
    try:
        yield request
    finally:
        restore()
