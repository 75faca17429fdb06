"""The child process of `rl_speed.rewards.pool`: receives items, calls one function, replies.

Run as a script by the pool, never imported by it. Standard library only, so that a worker starts
fast and stays small. Requests and replies use a socket of their own: what the function prints
cannot get between them.

    parent -> worker   (function, sys_path, memory_limit_mb, backstop_s, warm_up)    once
    worker -> parent   ("ready", "") or ("failed", traceback)               once
    parent -> worker   the function's arguments, a tuple                    per item
    worker -> parent   (value: float, cause: str, message: str)             per item
"""

import importlib
import os
import resource
import signal
import sys
import traceback
from multiprocessing.connection import Connection

_LARGEST = 3.4e38  # of float32, nearly
# Built beforehand: replying to a MemoryError should not have to allocate.
_OUT_OF_MEMORY = (0.0, "memory", "MemoryError")


def limit_memory(megabytes):
    """Caps this process's address space, so that a runaway expression cannot take the host down."""
    if megabytes is None or sys.platform == "darwin":  # macOS has the call but not the limit
        return
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def load(name):
    """Imports `module:function`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def evaluate(function, arguments):
    """Calls the function on one item. Returns (value, cause, message) and never raises."""
    try:
        result = function(*arguments)
        value, cause = result if isinstance(result, tuple) else (result, "ok")
        value = float(value)
        if not abs(value) <= _LARGEST:  # rewards are float32; a NaN is not smaller either
            return 0.0, "exception", f"returned {value}"
        return value, cause, ""
    except MemoryError:
        return _OUT_OF_MEMORY
    except BaseException as error:  # SystemExit and the like must not end the worker either
        message = "".join(traceback.format_exception_only(error)).strip()
        return 0.0, "exception", message[:500]  # some quote a whole expression


def serve(connection):
    """Answers items until the parent closes the connection or is gone."""
    function_name, search_path, memory_limit_mb, backstop_s, warm_up = connection.recv()
    sys.path[:] = search_path
    try:
        limit_memory(memory_limit_mb)
        function = load(function_name)
        for name, arguments in warm_up:
            load(name)(*arguments)
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        return
    connection.send(("ready", ""))
    # The parent kills a worker that overruns. Should the parent be gone by then, the kernel does:
    # SIGALRM's default action ends the process even inside a C extension that never returns.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    me = os.getpid()
    while True:
        try:
            arguments = connection.recv()
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, backstop_s)
        reply = evaluate(function, arguments)
        if os.getpid() != me:  # a fork that the item made and never ended: two would answer for one
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        connection.send(reply)


if __name__ == "__main__":
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # else a grandchild keeps the connection open
    serve(Connection(descriptor))
