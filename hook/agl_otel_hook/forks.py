"""What a process does first when it is a fork: run by Python's own hooks, and by `notice` where a library forked without them."""

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
    """Do what a fork has to do, where this process is one and nobody told Python."""
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
