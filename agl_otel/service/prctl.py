"""Properties of this process that only Linux has (prctl(2))."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_libc: Final = ctypes.CDLL(None)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this fork when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def set_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show, at most 15 bytes of it."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15])
