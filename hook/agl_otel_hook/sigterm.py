"""Close before a SIGTERM ends the process, where nothing but the default action would.

A handler of the agent's own stays the only one, whether it was there before the hook or not: what it does in the end (it returns, exits,
calls os._exit, or restores the default action and raises the signal again) is seen. So only the default action is replaced.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Literal

PAUSE_SECONDS: Final = (0.2, 5.0)
"""Delay before SIGTERM is sent again to this process if it still runs: initial and maximum; doubled each time."""
_set_handler: Final = signal.signal
_get_handler: Final = signal.getsignal


class Termination:
    """The handler of SIGTERM; one for each process. `close` is called in a thread: the interrupted code may hold any lock."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._ending: Literal["", "finishing", "finished"] = ""
        """Progress of the shutdown that a SIGTERM has begun; empty where there is none."""

    def install(self) -> None:
        """Replace the default action, in any thread: now, and whenever the agent restores it."""
        if threading.current_thread() is threading.main_thread():
            self._install()
        else:
            with contextlib.suppress(Exception):  # without ctypes, SIGTERM ends the process as it did without us
                call_in_main_thread(self._install)

    def complete(self) -> None:
        """End the process by a SIGTERM that has come, if the main thread reaches its end first: the default action would not let it."""
        if self._ending:
            self._kill(signal.SIGTERM)

    def after_fork(self) -> None:
        """Forget the shutdown of the parent process."""
        self._ending = ""

    def _install(self) -> None:
        @functools.wraps(_set_handler)
        def set_handler(signalnum: Any, handler: Any) -> Any:
            replaced = signalnum == signal.SIGTERM and handler == signal.SIG_DFL
            return self._shown(_set_handler(signalnum, self._handle if replaced else handler))

        @functools.wraps(_get_handler)
        def get_handler(signalnum: Any) -> Any:
            return self._shown(_get_handler(signalnum))

        signal.signal, signal.getsignal = set_handler, get_handler
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            _set_handler(signal.SIGTERM, self._handle)
        block_during_fork()

    def _shown(self, handler: Any) -> Any:
        """Return a handler as the agent is to see it: the default action in place of ours, which an agent's own would not go on to call."""
        return signal.SIG_DFL if handler == self._handle else handler

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ending == "finishing":  # the kernel sends one for each thread of a killed parent (die_with_parent)
            return
        if not self._ending:
            self._ending = "finishing"
            _thread.start_new_thread(self._end, (number,))
            return
        self._kill(number)

    def _kill(self, number: int) -> None:
        self._ending = ""
        _set_handler(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _end(self, number: int) -> None:
        self._close()
        self._ending, pause = "finished", PAUSE_SECONDS[0]
        while self._ending == "finished":  # a signal that comes just before the main thread blocks does not wake it
            os.kill(os.getpid(), number)
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_SECONDS[1])


def block_during_fork() -> None:
    """Block SIGTERM until fork has returned: Python drops signals that arrive while it creates a child.

    A fork handler (os.register_at_fork) would be too early to unblock it: later fork handlers have not run, so a lock may still be held
    by a thread of the parent, and an exception that the signal handler raises there is lost.
    """

    def patiently(fork: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fork)
        def wrapper(*args: Any) -> Any:
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            try:
                return fork(*args)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        return wrapper

    os.fork, os.forkpty = patiently(os.fork), patiently(os.forkpty)


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
