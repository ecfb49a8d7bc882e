"""Call a function in the main thread from another one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, Final


def call_in_main_thread(function: Callable[[], None]) -> None:
    """Have the main thread call `function` before its next bytecode, or in a lock for which it waits, if a signal interrupts that.

    SIGURG is such a signal, which has no effect unless somebody has a handler for it: for the moment it gets one that does nothing.
    """
    import ctypes

    python: Any = ctypes.pythonapi
    python.PyOS_getsig.restype, python.PyOS_setsig.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    wakes = python.PyOS_getsig(signal.SIGURG) is None  # the default action, which is a null pointer
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

    def call(_: object) -> int:
        _calls.clear()
        if wakes:
            python.PyOS_setsig(signal.SIGURG, None)
        function()
        return 0

    _calls.append(kind(call))
    python.Py_AddPendingCall(_calls[-1], None)
    if wakes and (main := threading.main_thread().ident) is not None:
        python.PyOS_setsig(signal.SIGURG, ctypes.cast(ctypes.CDLL(None).abs, ctypes.c_void_p))
        signal.pthread_kill(main, signal.SIGURG)


_calls: Final[list[object]] = []
"""What holds the function for the main thread until it is called."""
