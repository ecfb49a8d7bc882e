"""Report a signal while the main thread is blocked in C.

Python runs a signal's handler in the main thread, once that runs Python again or the signal interrupts its call. A signal that comes just
before the call is not handled until the call returns. What C code does at once is to write a byte to Python's wakeup descriptor; a thread
reads it. The descriptor is the agent's (asyncio's, uvloop's) whenever the agent sets one.
"""

from __future__ import annotations

import _socket
import _thread
import contextlib
import fcntl
import functools
import os
import signal
import sys
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any, Final

from wrapt import register_post_import_hook

from agl_otel_hook.main_thread import call_in_main_thread

LOWEST_DESCRIPTOR: Final = 256
"""Both descriptors are as high as this: agents put files of their own at low numbers, and expect the lowest ones to be free."""
START_SECONDS: Final = 1.0
"""Limit on waiting for the thread's start: a fork made outside Python that meets a thread waiting for the interpreter never ends."""
_CREDENTIALS_BYTES: Final = 12  # struct ucred: the sender's process id comes first
_set_wakeup_fd: Final = signal.set_wakeup_fd


class Wakeup:
    """Call `arrived` in a thread of its own when `number` reaches this process while `wanted`. Only on Linux.

    The thread starts with the first span, or as a child of multiprocessing does, which its parent ends by a signal: until then the process
    has none of ours, so that it may still enter a user namespace.
    """

    def __init__(self, number: int, arrived: Callable[[], None]) -> None:
        self._number = number
        self._arrived = arrived
        self._wanted = False
        self._receiver: _socket.socket | None = None
        self._sender = -1
        self._waiting = _thread.allocate_lock()
        """Held from the start of the thread on."""

    def install(self) -> None:
        """Prepare the descriptor, in the main thread, and hide it from the agent."""

        @functools.wraps(_set_wakeup_fd)
        def set_wakeup_fd(fd: int, /, *, warn_on_full_buffer: bool = True) -> int:
            before = _set_wakeup_fd(fd, warn_on_full_buffer=warn_on_full_buffer)
            if fd == -1 and self._wanted:
                self._set(self._sender)
            return -1 if before == self._sender else before

        signal.set_wakeup_fd = set_wakeup_fd
        self._open()
        register_post_import_hook(self._start_in_children, "multiprocessing.process")

    def want(self, wanted: bool) -> None:
        """Report signals from now on, or no longer; in the main thread."""
        self._wanted = wanted
        self._set(self._sender if wanted else -1)

    def start(self) -> None:
        """Start the thread, unless it runs; in any thread."""
        receiver = self._receiver
        if receiver is None or not isinstance(_thread.start_new_thread, BuiltinFunctionType) or not self._waiting.acquire(blocking=False):
            return  # gevent's threads run in the main thread
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # a signal that the agent has blocked stays pending
        with contextlib.suppress(RuntimeError):  # no new thread at interpreter shutdown, or beyond a limit
            listens = _thread.allocate_lock()
            listens.acquire()
            _thread.start_new_thread(self._listen, (receiver, listens))
            listens.acquire(timeout=START_SECONDS)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _start_in_children(self, process: Any) -> None:
        with contextlib.suppress(AttributeError):  # there is no public way into each child, however it is made
            bootstrap = process.BaseProcess._bootstrap

            @functools.wraps(bootstrap)
            def start_and_bootstrap(*args: Any, **kwargs: Any) -> Any:
                self.start()
                return bootstrap(*args, **kwargs)

            process.BaseProcess._bootstrap = start_and_bootstrap

    def after_fork(self) -> None:
        """Leave the parent process its sockets, and open others."""
        receiver, sender = self._receiver, self._sender
        if receiver is not None:
            self._reopen()
            if receiver.fileno() != -1:
                receiver.close()
                os.close(sender)

    def _reopen(self) -> None:
        self._set(-1)
        self._open()
        self.want(self._wanted)

    def _restart(self) -> None:
        self._reopen()
        self.start()

    def _open(self) -> None:
        self._receiver, self._sender, self._waiting = None, -1, _thread.allocate_lock()
        with contextlib.suppress(OSError, AttributeError):  # no descriptor is left, or this is not Linux
            receiver, sender = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_STREAM)
            receiver.setsockopt(_socket.SOL_SOCKET, _socket.SO_PASSCRED, 1)
            sender.setblocking(False)
            high = [fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, LOWEST_DESCRIPTOR) for end in (receiver, sender)]
            receiver.close()
            sender.close()
            self._receiver, self._sender = _socket.socket(fileno=high[0]), high[1]
            self._receiver.settimeout(None)

    def _set(self, descriptor: int) -> None:
        """Set Python's wakeup descriptor, unless it is the agent's."""
        with contextlib.suppress(OSError, ValueError):  # the agent has closed it, or forked outside Python in another thread
            before = _set_wakeup_fd(descriptor, warn_on_full_buffer=False)
            if before not in (-1, self._sender):
                _set_wakeup_fd(before, warn_on_full_buffer=False)

    def _listen(self, receiver: _socket.socket, listens: _thread.LockType) -> None:
        listens.release()
        while True:
            try:
                numbers, credentials, _, _ = receiver.recvmsg(64, _socket.CMSG_SPACE(_CREDENTIALS_BYTES))
            except OSError:
                return
            if not numbers:
                receiver.detach()  # the agent has closed all files; the numbers are other files' by now
                with contextlib.suppress(Exception):  # without ctypes
                    call_in_main_thread(self._restart)
                return
            senders = {int.from_bytes(data[:4], sys.byteorder) for _, _, data in credentials}
            if self._number in numbers and os.getpid() in senders:  # not in a fork made outside Python
                self._arrived()
