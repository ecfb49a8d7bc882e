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
from typing import Any, Final

from agl_otel_hook.main_thread import call_in_main_thread
from agl_otel_hook.wakeup import Wakeup

PAUSE_SECONDS: Final = (0.2, 5.0)
"""Delay before SIGTERM is sent again to this process if it still runs: initial and maximum; doubled each time."""
_set_handler: Final = signal.signal
_get_handler: Final = signal.getsignal


class Termination:
    """The handler of SIGTERM; one for each process. `close` is called in a thread: the interrupted code may hold any lock."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._wakeup = Wakeup(signal.SIGTERM, self._arrived)
        self._reset()

    def _reset(self) -> None:
        self._begun = _thread.allocate_lock()
        """Held from the SIGTERM on that has begun the shutdown."""
        self._finished = False

    def install(self) -> None:
        """Replace the default action, in any thread: now, and whenever the agent restores it."""
        if threading.current_thread() is threading.main_thread():
            self._install()
        else:
            with contextlib.suppress(Exception):  # without ctypes, SIGTERM ends the process as it did without us
                call_in_main_thread(self._install)

    def complete(self) -> None:
        """End the process by a SIGTERM that has come, if the main thread reaches its end first: the default action would not let it."""
        if self._begun.locked():
            self._kill()

    def after_fork(self) -> None:
        """Forget the shutdown of the parent process."""
        self._reset()
        self._wakeup.after_fork()

    def watch(self) -> None:
        """See a SIGTERM from now on also while the main thread is in a blocking call, for which its handler waits; in any thread."""
        self._wakeup.start()

    def _install(self) -> None:
        @functools.wraps(_set_handler)
        def set_handler(signalnum: Any, handler: Any) -> Any:
            if signalnum != signal.SIGTERM:
                return _set_handler(signalnum, handler)
            return self._shown(self._set(self._handle if handler == signal.SIG_DFL else handler))

        @functools.wraps(_get_handler)
        def get_handler(signalnum: Any) -> Any:
            return self._shown(_get_handler(signalnum))

        signal.signal, signal.getsignal = set_handler, get_handler
        self._wakeup.install()
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._set(self._handle)
        block_during_fork()

    def _shown(self, handler: Any) -> Any:
        """Return a handler as the agent is to see it: the default action in place of ours, which an agent's own would not go on to call."""
        return signal.SIG_DFL if handler == self._handle else handler

    def _set(self, handler: Any) -> Any:
        self._wakeup.want(False)  # first: what reaches a handler of the agent's is never reported
        try:
            return _set_handler(signal.SIGTERM, handler)
        finally:
            self._wakeup.want(_get_handler(signal.SIGTERM) == self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._finished:
            self._kill()
        elif self._begins():  # else the kernel has sent one for each thread of a killed parent (die_with_parent)
            _thread.start_new_thread(self._end, ())

    def _arrived(self) -> None:
        if self._begins():
            self._end()

    def _begins(self) -> bool:
        return self._begun.acquire(blocking=False)

    def _kill(self) -> None:
        self._finished = False
        _set_handler(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _end(self) -> None:
        self._close()
        self._finished, pause = True, PAUSE_SECONDS[0]
        while self._finished:  # a signal that comes just before the main thread blocks does not wake it
            os.kill(os.getpid(), signal.SIGTERM)
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
