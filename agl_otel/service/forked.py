"""What a fork does first: its own session and streams, and its death with its parent and its name (prctl(2), Linux only)."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_libc: Final = ctypes.CDLL(None)


def start_session(stdout: int, stderr: int) -> None:
    """Start a new session, if this process leads none, with these descriptors as output streams and no input."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    os.close(nothing)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM to this fork when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def set_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show, at most 15 bytes of it."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15])
