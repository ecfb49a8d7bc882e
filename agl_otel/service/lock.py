"""A lock for folders that only one process may use at a time: data directory, write-ahead log, queue, traces, run, proxy journal.

It is flock(2) on a file in or beside the folder: the kernel releases it when the process ends for any reason. Forks share it until they
exec. It does not work on network file systems without flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final

from agl_otel.errors import InUseError, SettingsError
from agl_otel.service.private import make_folder

_PID_BYTES: Final = 20
OTHER_DATA_DIR: Final = "choose another data directory with --data-dir or AGL_DATA_DIR"


class FileLock:
    """A lock held by this process until `close` or the end of a `with` block."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, path: Path) -> FileLock:
        """Lock a file, creating it if missing. Raises BlockingIOError if another process holds the lock, or another OSError."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            raise
        return cls(handle)

    @classmethod
    def hold(cls, path: Path, *, what: str, taken: Callable[[str], str], other: str = OTHER_DATA_DIR) -> FileLock:
        """Lock a file and write this process's id into it, for messages of other processes; create its folder if missing.

        Args:
            path: the file.
            what: names, in the message, what cannot be used if the file cannot be written.
            taken: returns the message if another process holds the lock, given its id (`?` if unknown).
            other: the remedy if the file cannot be written.

        Raises InUseError, SettingsError.
        """
        try:
            make_folder(path.parent)
            lock = cls.take(path)
        except BlockingIOError:
            raise InUseError(taken(holder(path))) from None
        except OSError as error:
            raise SettingsError(f"{what} cannot be written: {error.strerror or error}. Fix its permissions, or {other}") from None
        with contextlib.suppress(OSError):  # a full disk: the lock holds, only without the holder's id
            os.truncate(lock._handle, 0)
            os.pwrite(lock._handle, str(os.getpid()).encode(), 0)
        return lock

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def holder(path: Path) -> str:
    """Return the id of the process that holds a lock taken by `hold`; `?` if unknown."""
    try:
        with path.open("rb") as file:
            return str(int(file.read(_PID_BYTES)))
    except (OSError, ValueError):
        return "?"
