"""A lock for folders that only one process may use at a time: data directory, write-ahead log, queue, traces, run, proxy journal.

It is flock(2) on a file in or beside the folder: the kernel releases it when the process ends for any reason. Forks share it until they
exec. It does not work on network file systems without flock.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from types import TracebackType
from typing import Final

from agl_otel.errors import InUseError, SettingsError
from agl_otel.service.private import make_folder

_PID_BYTES: Final = 20
_BESIDE: Final = "agl-otel-"  # in the names of temporary folders, so that nothing of the user's is taken for one
OTHER_DATA_DIR: Final = "choose another data directory with --data-dir or AGL_DATA_DIR"


class FileLock:
    """A lock held by this process until `close` or the end of a `with` block."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    @classmethod
    def take(cls, path: Path, *, shared: bool = False) -> FileLock:
        """Lock a file, creating it if missing; a `shared` lock excludes only those that are not.

        Raises BlockingIOError if another process holds the lock, or another OSError.
        """
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
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

    def is_at(self, path: Path) -> bool:
        """Return whether `path` is still the locked file, not deleted or replaced."""
        try:
            return os.path.samestat(os.fstat(self._handle), path.stat())
        except OSError:
            return False

    def close(self) -> None:
        """Release the lock. A second call does nothing."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@contextlib.contextmanager
def folder_beside(target: Path) -> Generator[Path]:
    """Yield a temporary folder beside `target`. The block may rename it; otherwise it is removed at the end.

    Folders that killed processes left there are removed, too: each is locked by its maker, so one that can be locked has none any more.
    On a file system that cannot lock folders they stay. Raises OSError.
    """
    prefix = f".{target.name}.{_BESIDE}"
    for left in target.parent.glob(f"{glob.escape(prefix)}*"):
        with contextlib.suppress(OSError), _locked_folder(left):
            shutil.rmtree(left, ignore_errors=True)
    while True:
        beside = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(_locked_folder(beside))
            except (BlockingIOError, FileNotFoundError):
                continue  # another process took it for one that was left
            except OSError:  # no locks of folders here
                pass
            if not beside.exists():
                continue
            try:
                yield beside
            finally:
                shutil.rmtree(beside, ignore_errors=True)
            return


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Generator[None]:
    """Lock a folder for the block. Raises BlockingIOError where another process holds it, or another OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def holder(path: Path) -> str:
    """Return the id of the process that holds a lock taken by `hold`; `?` if unknown."""
    try:
        with path.open("rb") as file:
            return str(int(file.read(_PID_BYTES)))
    except (OSError, ValueError):
        return "?"
