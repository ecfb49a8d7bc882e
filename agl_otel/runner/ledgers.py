"""The ledgers of a runner's attempts: folders in which agents' processes count, read when the agent has ended (the hook's records.py).

They lie below one folder of this user on this machine, so that a runner hands in what a dead one left. The process of a runner has a
folder of its own there, which it holds locked; in it one for each attempt that it runs, and beside that a note of whose attempt it is.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from agl_otel.service.processes import is_alive
from agl_otel.spans.tolerant import json_of
from agl_otel.text import printable
from agl_otel.types import AttemptLedger, LedgerReach, ProcessRecord
from agl_otel_hook import records

MAX_SHOWN: Final = 120
"""Characters of a command that are handed in."""
MAX_SHOWN_IN_ALL: Final = 128 << 10
"""Characters of all commands of an attempt, so that of records.MAX_FILES processes less than 2 MiB are handed in, whatever they wrote."""
_LOCK: Final = "lock"
_NOTE: Final = ".json"
MAX_NOTE_BYTES: Final = 64 << 10
KEPT_SECONDS: Final = 7 * 86400.0  # what runners of another store left: theirs may start again
HIDDEN_SECONDS: Final = 3600.0
_log = logging.getLogger(__name__)
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Left:
    """A ledger that a runner which is gone has left."""

    rollout_id: str
    attempt_id: str
    ledger: AttemptLedger
    folder: Path


@dataclass(slots=True)
class Ledgers:
    """The folders of one runner.

    `store` names the queue that its attempts belong to: what others left of it is found by that. `reach` and `command` are those of its
    agent.
    """

    store: str
    reach: LedgerReach = "elsewhere"
    command: str = ""
    base: Path = field(default_factory=lambda: own_folder())
    root: Path = field(init=False)
    """What agents' environments name: one for all runners of this process."""
    _process: tuple[int, int] = field(init=False)
    """This one: its id, and when it began in clock ticks."""

    def __post_init__(self) -> None:
        self.command = self.command[:MAX_SHOWN]
        self._process = os.getpid(), records.start_ticks(os.getpid())
        self.root = _root_of_process(self.base)

    def begin(self, keys: Sequence[Key]) -> None:
        """Make the folders of attempts that are about to run. Raises OSError."""
        for rollout_id, attempt_id in keys:
            folder = records.folder_of(self.root, rollout_id, attempt_id)
            if folder.is_symlink():
                folder.unlink()
            folder.mkdir(mode=0o777, exist_ok=True, parents=True)  # parents: where somebody cleared the folder for temporary files
            _set_mode(folder, 0o777)  # a container's user may be another one; nobody else gets through the folder above
            note = {"store": self.store, "rollout": rollout_id, "attempt": attempt_id, "reach": self.reach, "command": self.command}
            _write_note(folder, json.dumps(note).encode())  # beside it: a container's agent writes into the folder

    def read(self, key: Key) -> AttemptLedger:
        """What the processes of an attempt have done; what they begin from now on is late."""
        return _read(records.folder_of(self.root, *key), key, self.reach, self.command, self._process)

    def running(self, key: Key) -> set[int]:
        """The processes that the attempt's ledger names and that have not ended; never this one, which an agent may name as well."""
        with contextlib.suppress(records.UnreadableError):
            found = records.read(records.folder_of(self.root, *key), records.key_of(*key))
            return {process.pid for process in found if is_running(process.pid, process.start_ticks)} - {os.getpid()}
        return set()

    def forget(self, key: Key) -> None:
        """The ledger is handed in: remove it."""
        _remove(records.folder_of(self.root, *key))

    def forget_left(self, left: Left) -> None:
        """That one is handed in: remove it."""
        _remove(left.folder)

    def left(self) -> list[Left]:
        """What runners of this store that are gone have left, where the processes of the attempt are gone, too.

        It is this runner's to hand in, and nobody else's, until `close`. Empty folders go, and so does what nobody handed in for a week.
        """
        found: list[Left] = []
        for root in sorted(self.base.iterdir()):
            if root.name.startswith("."):  # made by a process that died before it was locked, unless it is new
                _remove_old(root, HIDDEN_SECONDS)
            elif root not in _own_roots.values() and not root.is_symlink() and self._claimed(root):
                folders = [path.with_suffix("") for path in sorted(root.glob(f"*{_NOTE}"))]
                ours = [(folder, note) for folder in folders if (note := _note(folder)) is not None and note.store == self.store]
                found += [left for folder, note in ours if (left := _left(folder, note)) is not None]
                if not ours:
                    _release(root)
                    _remove_old(root, KEPT_SECONDS if folders else 0.0)
        return found

    def close(self) -> None:
        """Leave what is not handed in yet to others."""
        for root in [root for root, (_, owner) in _claims.items() if owner is self]:
            _release(root)

    def _claimed(self, root: Path) -> bool:
        if root not in _claims and (lock := _claim(root)) is not None:
            _claims[root] = lock, self
        return root in _claims and _claims[root][1] is self


class _Note(NamedTuple):
    """Whose attempt a folder is of."""

    store: str
    rollout: str
    attempt: str
    reach: LedgerReach
    command: str


def _note(folder: Path) -> _Note | None:
    """What its runner wrote; None where it cannot be read now. With another text in its place the folder is removed."""
    try:
        return _Note(**json_of(_noted(folder).decode()))
    except (ValueError, TypeError) as error:
        _log.warning("the ledger %s cannot be handed in: %s", folder, error)
        _remove(folder)
    except OSError as error:  # too many open files, say: it is looked at again
        _log.warning("the ledger %s cannot be read: %s", folder, error.strerror)
    return None


def _noted(folder: Path) -> bytes:
    """What stands beside the folder. Raises OSError, and ValueError where it is no file of a runner's."""
    fd = os.open(folder.with_suffix(_NOTE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("its note is no file")
        return os.read(fd, MAX_NOTE_BYTES)
    finally:
        os.close(fd)


def _write_note(folder: Path, text: bytes) -> None:
    path = folder.with_suffix(_NOTE)
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, text)
    finally:
        os.close(fd)


def _left(folder: Path, note: _Note) -> Left | None:
    """The ledger in the folder; None as long as a process that it names runs."""
    key = note.rollout, note.attempt
    with contextlib.suppress(records.UnreadableError):
        if any(is_running(process.pid, process.start_ticks) for process in records.read(folder, records.key_of(*key))):
            return None
    return Left(*key, _read(folder, key, note.reach, note.command, _owner(_claims[folder.parent][0])), folder)


def _remove(folder: Path) -> None:
    """Whatever the agent has made of it: what a link names stays as it is."""
    with contextlib.suppress(OSError):
        _set_mode(folder, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.unlink(missing_ok=True)
    folder.with_suffix(_NOTE).unlink(missing_ok=True)


def _set_mode(folder: Path, mode: int) -> None:
    """Change the mode of a folder, and of nothing that a link names. Raises OSError where it is no folder."""
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)  # opens what may not be read, too
    try:
        Path(f"/proc/self/fd/{fd}").chmod(mode)
    finally:
        os.close(fd)


def _remove_old(root: Path, seconds: float) -> None:
    """Remove it where nothing was put into it for so long."""
    with contextlib.suppress(OSError):
        if max(path.lstat().st_mtime for path in (root, *root.iterdir())) <= time.time() - seconds:
            shutil.rmtree(root, ignore_errors=True)


_claims: Final[dict[Path, tuple[int, Ledgers]]] = {}
"""{folder of a dead runner: (its lock, who in this process hands it in)}."""
_own_roots: Final[dict[tuple[int, Path], Path]] = {}
"""{(this process, base): its folder}. (A lock would be lost when this process opened and closed its file again.)"""


def _root_of_process(base: Path) -> Path:
    key = (os.getpid(), base)
    if key not in _own_roots:
        name = secrets.token_hex(8)
        hidden, root = base / f".{name}", base / name
        hidden.mkdir(mode=0o700)
        lock = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # until the end of the process
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(lock, f"{os.getpid()} {records.start_ticks(os.getpid())}".encode())
        hidden.rename(root)  # nobody looks at it before it is locked
        atexit.register(_remove_empty, os.getpid(), root)
        _own_roots[key] = root
    return _own_roots[key]


def _remove_empty(pid: int, root: Path) -> None:
    """Remove the folder where all of it was handed in."""
    if os.getpid() == pid and [path.name for path in root.iterdir() if path.suffix != records.FILE_SUFFIX] == [_LOCK]:
        shutil.rmtree(root, ignore_errors=True)


def own_folder() -> Path:
    """This user's folder for ledgers, for this user alone. Raises OSError where something else is in its place."""
    folder = Path(tempfile.gettempdir()) / records.own_folder_name()
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder that only user {os.getuid()} may enter: remove it, or set TMPDIR to another folder"
        )
    return folder


def _claim(root: Path) -> int | None:
    """Take the lock of a process that is gone: it is free (forks do not inherit it), and no process here is the one that it names.

    Either alone could be wrong: a process may lose its lock by closing all files, and may be in another namespace of process ids.
    """
    try:
        lock = os.open(root / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = _owner(lock)
        if owner is not None and not is_running(*owner):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def _owner(lock: int) -> tuple[int, int] | None:
    """The process that a lock names: its id, and when it began in clock ticks. (Its file is not opened for that: see `_own_roots`.)"""
    try:
        pid, ticks = map(int, os.pread(lock, 100, 0).split())
    except (OSError, ValueError):
        return None
    return pid, ticks


def _release(root: Path) -> None:
    lock, _ = _claims.pop(root)
    os.close(lock)


def is_running(pid: int, start_ticks: int) -> bool:
    """Whether the process that began then still runs, and not another one that has its number now."""
    return records.start_ticks(pid) == start_ticks != 0 and is_alive(pid)


def _read(folder: Path, key: Key, reach: LedgerReach, command: str, runner: tuple[int, int] | None) -> AttemptLedger:
    ledger = AttemptLedger(reach=reach, command=printable(command)[:MAX_SHOWN])
    try:
        found = records.read(folder, records.key_of(*key), last=True)
    except records.UnreadableError as error:
        ledger.problem = str(error)
        return ledger
    shown = min(MAX_SHOWN, MAX_SHOWN_IN_ALL // max(1, len(found)))
    for process in found:
        is_runner = (process.pid, process.start_ticks) == runner
        record = ProcessRecord(pid=process.pid, command=printable(" ".join(process.command.split()))[:shown], runner=is_runner)
        if (slot := process.slot) is not None:
            record.marker, record.closed = slot.marker, slot.closed
            record.begun, record.ended, record.abandoned, record.dropped = slot.begun, slot.ended, slot.abandoned, slot.dropped
        if process.no_record is not None:
            record.marker, record.no_record = process.no_record.marker, os.strerror(process.no_record.errno)
        if process.fork_errno:
            record.fork_without_record = os.strerror(process.fork_errno)
        ledger.processes.append(record)
    return ledger
