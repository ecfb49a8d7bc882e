"""Ledgers: folders in which an attempt's processes record their span counts (the hook's records.py), read when the agent has ended.

All ledgers of a user lie below one folder of the machine, so that a runner finds those of a dead one and reports them. In it every
runner process has a folder that it holds locked, which contains a folder for each attempt and, beside that, a note that names the attempt.
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
from agl_otel.text import printable, without_secrets
from agl_otel.types import AttemptLedger, LedgerReach, ProcessRecord
from agl_otel_hook import records

MAX_COMMAND_CHARACTERS: Final = 120
"""Longest command in a report, in characters; longer ones are cut."""
MAX_ATTEMPT_COMMAND_CHARACTERS: Final = 128 << 10
"""Limit for all commands of an attempt together, which keeps the report on records.MAX_FILES processes below 2 MiB."""
_LOCK: Final = "lock"
_NOTE: Final = ".json"
MAX_NOTE_BYTES: Final = 64 << 10
RETENTION_SECONDS: Final = 7 * 86400.0  # for ledgers of dead runners of another store, which may start a runner again
UNLOCKED_SECONDS: Final = 3600.0  # age at which a folder that never got its lock is removed: its process died while making it
_log = logging.getLogger(__name__)
Key = tuple[str, str]


class OrphanedLedger(NamedTuple):
    """The ledger of an attempt whose runner has died, as its note names it."""

    folder: Path
    rollout_id: str
    attempt_id: str
    reach: LedgerReach
    command: str


@dataclass(slots=True)
class Ledgers:
    """The folders of one runner.

    Args:
        reach: of the runner's agent.
        command: of the runner's agent, for display.
        base: the folder above those of all runners; default `user_folder()`.
    """

    reach: LedgerReach = "elsewhere"
    command: str = ""
    base: Path = field(default_factory=lambda: user_folder())
    root: Path = field(init=False)
    """The folder that agents' environments name; shared by all runners of this process."""
    _process: tuple[int, int] = field(init=False)
    """(process id, start time in clock ticks) of this process."""

    def __post_init__(self) -> None:
        self.command = self.command[:MAX_COMMAND_CHARACTERS]
        self._process = os.getpid(), records.start_ticks(os.getpid())
        self.root = _root_of_process(self.base)

    def create(self, keys: Sequence[Key]) -> None:
        """Create the ledgers of attempts that are about to run. Raises OSError."""
        for closed in (self.base, self.root):  # the folder for temporary files may have been cleared
            _make_closed(closed)
        for rollout_id, attempt_id in keys:
            folder = records.folder_of(self.root, rollout_id, attempt_id)
            if folder.is_symlink():
                folder.unlink()
            folder.mkdir(exist_ok=True)
            _set_mode(folder, 0o777)  # for a container, which may run as any user; the folders above are closed to other users
            note = {"rollout": rollout_id, "attempt": attempt_id, "reach": self.reach, "command": self.command}
            _write_note(folder, json.dumps(note).encode())  # beside the folder, which is writable by the agent

    def read(self, key: Key) -> AttemptLedger:
        """Read the span counts of an attempt's processes; spans that they start from now on are late."""
        return _read(records.folder_of(self.root, *key), key, self.reach, self.command, self._process)

    def running(self, key: Key) -> set[int]:
        """Return the ids of running processes in the attempt's ledger, without this process, which an agent may list as well."""
        with contextlib.suppress(records.UnreadableError):
            found = records.read(records.folder_of(self.root, *key), records.key_of(*key))
            return {process.pid for process in found if is_running(process.pid, process.start_ticks)} - {os.getpid()}
        return set()

    def remove(self, key: Key) -> None:
        """Remove a ledger that was reported."""
        _remove(records.folder_of(self.root, *key))

    def orphaned(self) -> list[OrphanedLedger]:
        """Claim the ledgers of this user's dead runners, of all stores; no other runner gets them until `close`."""
        found: list[OrphanedLedger] = []
        for root in sorted(self.base.iterdir()):
            if root.name.startswith("."):  # not locked yet
                _remove_old(root, UNLOCKED_SECONDS)
            elif root not in _own_roots.values() and not root.is_symlink() and self._claimed(root):
                notes = (_read_note(path.with_suffix("")) for path in sorted(root.glob(f"*{_NOTE}")))
                found += [note for note in notes if note is not None]
        return found

    def read_orphaned(self, orphan: OrphanedLedger) -> AttemptLedger | None:
        """Read a claimed ledger; None while one of its processes runs."""
        key = orphan.rollout_id, orphan.attempt_id
        with contextlib.suppress(records.UnreadableError):
            if any(is_running(process.pid, process.start_ticks) for process in records.read(orphan.folder, records.key_of(*key))):
                return None
        return _read(orphan.folder, key, orphan.reach, orphan.command, _owner(_claims[orphan.folder.parent][0]))

    def remove_orphaned(self, orphan: OrphanedLedger) -> None:
        """Remove an orphaned ledger that was reported."""
        _remove(orphan.folder)

    def close(self) -> None:
        """Release the claims on orphaned ledgers, so that other runners can report them.

        Empty folders are removed, as are ledgers that were not reported for RETENTION_SECONDS.
        """
        for root in [root for root, (_, owner) in _claims.items() if owner is self]:
            _remove_old(root, RETENTION_SECONDS if any(root.glob(f"*{_NOTE}")) else 0.0)
            _release(root)

    def _claimed(self, root: Path) -> bool:
        if root not in _claims and (lock := _claim(root)) is not None:
            _claims[root] = lock, self
        return root in _claims and _claims[root][1] is self


def _read_note(folder: Path) -> OrphanedLedger | None:
    """Read a ledger's note; None where that fails. A ledger whose note is malformed is removed."""
    try:
        note = json_of(_read_note_bytes(folder).decode())
        return OrphanedLedger(folder, note["rollout"], note["attempt"], note["reach"], note["command"])
    except (ValueError, TypeError, LookupError) as error:
        _log.warning("the ledger %s cannot be reported and is removed: %s", folder, error)
        _remove(folder)
    except OSError as error:  # e.g. too many open files: retried at the next poll
        _log.warning("the ledger %s cannot be read: %s", folder, error.strerror)
    return None


def _read_note_bytes(folder: Path) -> bytes:
    """Read the note beside the folder. Raises OSError, and ValueError where it is not a regular file."""
    fd = os.open(folder.with_suffix(_NOTE), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("its note is not a regular file")
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


def _remove(folder: Path) -> None:
    """Remove a ledger and its note, whatever the agent put in their place; the targets of links are left alone."""
    with contextlib.suppress(OSError):
        _set_mode(folder, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.unlink(missing_ok=True)
    folder.with_suffix(_NOTE).unlink(missing_ok=True)


def _set_mode(folder: Path, mode: int) -> None:
    """Change the mode of a folder without following links. Raises OSError where it is not a folder."""
    if os.chmod in os.supports_follow_symlinks:  # not on Linux
        os.chmod(folder, mode, follow_symlinks=False)  # noqa: PTH101 - Path.chmod is the same
        return
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)  # O_PATH needs no read permission
    try:
        Path(f"/proc/self/fd/{fd}").chmod(mode)
    finally:
        os.close(fd)


def _remove_old(root: Path, seconds: float) -> None:
    """Remove the folder if nothing in it changed for `seconds`."""
    with contextlib.suppress(OSError):
        if max(path.lstat().st_mtime for path in (root, *root.iterdir())) <= time.time() - seconds:
            shutil.rmtree(root, ignore_errors=True)


_claims: Final[dict[Path, tuple[int, Ledgers]]] = {}
"""{folder of a dead runner: (descriptor of its lock, claiming runner of this process)}."""
_own_roots: Final[dict[tuple[int, Path], Path]] = {}
"""{(process id, base): folder of this process}. Its lock file must not be opened again: closing it would release the lock (POSIX)."""


def _root_of_process(base: Path) -> Path:
    key = (os.getpid(), base)
    if key not in _own_roots:
        name = secrets.token_hex(8)
        hidden, root = base / f".{name}", base / name
        hidden.mkdir(mode=0o700)
        lock = os.open(hidden / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open until the process exits
        fcntl.lockf(lock, fcntl.LOCK_EX)
        os.write(lock, f"{os.getpid()} {records.start_ticks(os.getpid())}".encode())
        hidden.rename(root)  # visible to other runners only with its lock held
        atexit.register(_remove_empty, os.getpid(), root)
        _own_roots[key] = root
    return _own_roots[key]


def _remove_empty(pid: int, root: Path) -> None:
    """Remove the folder of this process if no ledger is left in it."""
    with contextlib.suppress(FileNotFoundError):
        if os.getpid() == pid and [path.name for path in root.iterdir() if path.suffix != records.FILE_SUFFIX] == [_LOCK]:
            shutil.rmtree(root, ignore_errors=True)


def user_folder() -> Path:
    """Make the folder for all ledgers of this user, accessible to no other. Raises OSError where its path is taken."""
    return _make_closed(Path(tempfile.gettempdir()) / records.own_folder_name())


def _make_closed(folder: Path) -> Path:
    """Make the folder, where it is missing, and return it. Raises OSError where others than this user may enter it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder that only user {os.getuid()} may enter: remove it, or set TMPDIR to another folder"
        )
    return folder


def _claim(root: Path) -> int | None:
    """Take the lock of a dead process: one that is free, and whose owner is not running. Forks do not inherit locks.

    Both conditions are needed: a live process may lose its lock by closing all files, and may be in another PID namespace.
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
    """Read (process id, start time in clock ticks) of a lock's owner, from its open descriptor (see `_own_roots`)."""
    try:
        pid, ticks = map(int, os.pread(lock, 100, 0).split())
    except (OSError, ValueError):
        return None
    return pid, ticks


def _release(root: Path) -> None:
    lock, _ = _claims.pop(root)
    os.close(lock)


def is_running(pid: int, start_ticks: int) -> bool:
    """Return whether the process with this id and start time runs; a later process with the same id does not count."""
    return records.start_ticks(pid) == start_ticks and is_alive(pid)  # without /proc both are 0


def _shown(command: str) -> str:
    """Return a command line on one line, without the secrets in it: it goes into verdicts."""
    return printable(" ".join(without_secrets(command.split())))


def _read(folder: Path, key: Key, reach: LedgerReach, command: str, runner: tuple[int, int] | None) -> AttemptLedger:
    ledger = AttemptLedger(reach=reach, command=_shown(command)[:MAX_COMMAND_CHARACTERS])
    try:
        found = records.read(folder, records.key_of(*key), last=True)
    except records.UnreadableError as error:
        ledger.problem = str(error)
        return ledger
    limit = min(MAX_COMMAND_CHARACTERS, MAX_ATTEMPT_COMMAND_CHARACTERS // max(1, len(found)))
    for process in found:
        is_runner = (process.pid, process.start_ticks) == runner
        record = ProcessRecord(pid=process.pid, command=_shown(process.command)[:limit], runner=is_runner)
        if (slot := process.slot) is not None:
            record.marker, record.closed = slot.marker, slot.closed
            record.begun, record.ended, record.abandoned, record.dropped = slot.begun, slot.ended, slot.abandoned, slot.dropped
        if process.no_record is not None:
            record.marker, record.no_record = process.no_record.marker, os.strerror(process.no_record.errno)
        if process.fork_errno:
            record.fork_without_record = os.strerror(process.fork_errno)
        ledger.processes.append(record)
    return ledger
