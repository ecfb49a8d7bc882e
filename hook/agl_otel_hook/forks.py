"""Fork handlers: run by those of Python in a child, and by `notice` where a library forked outside Python."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Final

_registered: Final[list[weakref.WeakMethod[Callable[[], None]]]] = []
_pid = os.getpid()


def register(after_fork: Callable[[], None]) -> None:
    """Call a bound method in each fork of this process, in the order of registration, for as long as its object lives."""
    _registered[:] = [weak for weak in _registered if weak() is not None]
    _registered.append(weakref.WeakMethod(after_fork))


def notice() -> None:
    """Run the fork handlers if this process is a fork made outside Python."""
    if os.getpid() != _pid:
        _run()


def _run() -> None:
    global _pid
    _pid = os.getpid()
    for weak in _registered:
        after_fork = weak()
        if after_fork is not None:
            after_fork()


os.register_at_fork(after_in_child=_run)
