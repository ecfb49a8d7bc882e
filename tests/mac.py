"""The nearest to macOS that Linux has: `python -m tests.mac COMMAND …` runs `agl-otel COMMAND …` without what only Linux has.

Gone are the attributes of os, signal, resource, socket and fcntl that macOS lacks, the functions of Linux's libc, and /proc.
sys.platform is "darwin" for our modules alone: other packages would look for Apple's frameworks.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

OF_LINUX = {
    os: ("sched_", "pidfd_", "memfd_", "posix_fallocate", "posix_fadvise", "fdatasync", "pipe2", "eventfd", "splice", "copy_file_range",
         "getrandom", "O_PATH", "O_TMPFILE", "O_DIRECT_", "setresuid", "setresgid", "getresuid", "unshare", "setns", "P_PIDFD"),
    signal: ("SIGRT", "sigtimedwait", "sigwaitinfo", "pidfd_", "SIGPWR", "SIGPOLL", "SIGSTKFLT"),
    resource: ("prlimit", "RLIMIT_SIGPENDING", "RLIMIT_MSGQUEUE", "RLIMIT_NICE", "RLIMIT_RT"),
    socket: ("SO_PEERCRED", "TCP_USER_TIMEOUT", "TCP_QUICKACK"),
    fcntl: ("F_OFD_", "F_SETPIPE_SZ", "F_GETPIPE_SZ", "F_ADD_SEALS", "F_NOTIFY"),
}  # fmt: skip
"""{module: prefixes of what is not on macOS}. What Python itself and other packages use on Linux is left: epoll, AF_PACKET."""
LIBC = ("prctl", "malloc_trim", "mallopt", "malloc_info", "syscall")


class _Darwin:
    """Stands for `sys` in our modules."""

    platform = "darwin"

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)


def leave_linux() -> None:
    """Take from this process what macOS does not have."""
    for module, prefixes in OF_LINUX.items():
        for name in [name for name in vars(module) if name.startswith(prefixes)]:
            delattr(module, name)
    sys.modules["psutil"] = None  # pyright: ignore[reportArgumentType]  # not ours, and here it is that of Linux
    of_library = ctypes.CDLL.__getattr__

    def found(library: ctypes.CDLL, name: str) -> Any:
        if name in LIBC:
            raise AttributeError(f"dlsym({library._name}, {name}): symbol not found")
        return of_library(library, name)

    ctypes.CDLL.__getattr__ = found  # pyright: ignore[reportAttributeAccessIssue]
    sys.addaudithook(_refuse)
    change = os.chmod
    os.chmod = lambda path, mode, *, dir_fd=None, follow_symlinks=True: change(path, mode)
    os.supports_follow_symlinks.add(os.chmod)
    for name in ("stat", "lstat", "access"):
        setattr(os, name, _without_proc(getattr(os, name)))


def _is_proc(path: object) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith("/proc")  # pyright: ignore[reportUnknownArgumentType]


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir", "os.chmod") and _is_proc(arguments[0]):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), arguments[0])


def _without_proc(function: Callable[..., Any]) -> Callable[..., Any]:
    def asked(path: Any, *more: Any, **named: Any) -> Any:
        if _is_proc(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return function(path, *more, **named)

    return asked


if __name__ == "__main__":
    leave_linux()
    import agl_otel.service.forkserver
    import agl_otel.settings

    for module in (agl_otel.settings, agl_otel.service.forkserver):
        module.sys = _Darwin()  # pyright: ignore[reportAttributeAccessIssue]
    from agl_otel.cli import main

    main(sys.argv[1:])
