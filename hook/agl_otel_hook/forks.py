"""Fork handlers: run by those of Python in a child, and by `notice` where a library forked outside Python."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from typing import Final

_WIPE_ON_FORK: Final = 18
"""MADV_WIPEONFORK of Linux 4.14: in each fork of the process the page reads as zeros. Asking for it is ten times cheaper than getpid."""
_registered: Final[list[weakref.WeakMethod[Callable[[], None]]]] = []
_pid = os.getpid()


def _wiped_page() -> mmap.mmap | None:
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(_WIPE_ON_FORK)
    except (OSError, ValueError):
        return None
    page[0] = 1
    return page


_page = _wiped_page()


def register(after_fork: Callable[[], None]) -> None:
    """Call a bound method in each fork of this process, in the order of registration, for as long as its object lives."""
    _registered[:] = [weak for weak in _registered if weak() is not None]
    _registered.append(weakref.WeakMethod(after_fork))


def notice() -> None:
    """Run the fork handlers if this process is a fork made outside Python."""
    if not _page[0] if _page is not None else os.getpid() != _pid:
        _run()


def _run() -> None:
    global _pid
    _pid = os.getpid()
    if _page is not None:
        _page[0] = 1
    for weak in _registered:
        after_fork = weak()
        if after_fork is not None:
            after_fork()


os.register_at_fork(after_in_child=_run)
