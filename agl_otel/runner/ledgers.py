"""The ledgers of a runner's attempts: folders in which agents' processes count, read when the agent has ended (instrumentation/records.py).

They lie below one folder of this user on this machine, so that a runner hands in what a dead one left. The process of a runner has a
folder of its own there, which it holds locked; in it one for each attempt that it runs, with a note of whose attempt that is.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from agl_otel.instrumentation import records
from agl_otel.printable import printable
from agl_otel.runner.groups import is_zombie
from agl_otel.types import AttemptLedger, LedgerReach, ProcessRecord

MAX_SHOWN: Final = 120
"""Characters of a command that are handed in."""
_LOCK: Final = "lock"
_NOTE: Final = "attempt.json"
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

    def __post_init__(self) -> None:
        self.command = self.command[:MAX_SHOWN]
        self.root = _root_of_process(self.base)

    def begin(self, keys: Sequence[Key]) -> None:
        """Make the folders of attempts that are about to run. Raises OSError."""
        for rollout_id, attempt_id in keys:
            folder = records.folder_of(self.root, rollout_id, attempt_id)
            folder.mkdir(mode=0o777, exist_ok=True, parents=True)  # parents: where somebody cleared the folder for temporary files
            folder.chmod(0o777)  # a container's user may be another one; nobody else gets through the folder above
            note = {"store": self.store, "rollout": rollout_id, "attempt": attempt_id, "reach": self.reach, "command": self.command}
            (folder / _NOTE).write_text(json.dumps(note))

    def read(self, key: Key) -> AttemptLedger:
        """What the processes of an attempt have done; what they begin from now on is late."""
        return _read(records.folder_of(self.root, *key), key, self.reach, self.command)

    def running(self, key: Key) -> set[int]:
        """The processes that the attempt's ledger names and that have not ended; never this one, which an agent may name as well."""
        with contextlib.suppress(records.UnreadableError):
            found = records.read(records.folder_of(self.root, *key), records.key_of(*key))
            return {process.pid for process in found if is_running(process.pid, process.start_ticks)} - {os.getpid()}
        return set()

    def forget(self, key: Key) -> None:
        """The ledger is handed in: remove it."""
        shutil.rmtree(records.folder_of(self.root, *key), ignore_errors=True)

    def left(self) -> list[Left]:
        """What runners of this store that are gone have left, where the processes of the attempt are gone, too. Empty folders go."""
        found: list[Left] = []
        for root in sorted(self.base.iterdir()):
            if root.name.startswith(".") or root in _own_roots.values() or not root.is_dir() or not _is_left(root):
                continue
            attempts = [attempt for folder in sorted(root.iterdir()) if folder.is_dir() and (attempt := self._left(folder)) is not None]
            found += attempts
            if not any(folder.is_dir() for folder in root.iterdir()):
                shutil.rmtree(root, ignore_errors=True)
        return found

    def _left(self, folder: Path) -> Left | None:
        try:
            note = json.loads((folder / _NOTE).read_bytes())
            if note["store"] != self.store:
                return None
            key = str(note["rollout"]), str(note["attempt"])
            with contextlib.suppress(records.UnreadableError):
                if any(is_running(process.pid, process.start_ticks) for process in records.read(folder, records.key_of(*key))):
                    return None  # for the next look
            return Left(*key, _read(folder, key, note["reach"], note["command"]), folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("the ledger %s cannot be handed in: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            return None


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
    if os.getpid() == pid and [path.name for path in root.iterdir()] == [_LOCK]:
        shutil.rmtree(root, ignore_errors=True)


def own_folder() -> Path:
    """This user's folder for ledgers, for this user alone. Raises OSError where something else is in its place."""
    folder = Path(tempfile.gettempdir()) / f"agl-otel-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder that only user {os.getuid()} may enter: remove it, or set TMPDIR to another folder"
        )
    return folder


def _is_left(root: Path) -> bool:
    """Whether the process that made it is gone: its lock is free (forks do not inherit it), and no process here is the one it names.

    Either alone could be wrong: a process may lose its lock by closing all files, and may be in another namespace of process ids.
    """
    try:
        fd = os.open(root / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        pid, ticks = map(int, os.read(fd, 100).split())
    except (OSError, ValueError):
        return False
    finally:
        os.close(fd)
    return not is_running(pid, ticks)


def is_running(pid: int, start_ticks: int) -> bool:
    """Whether the process that began then still runs, and not another one that has its number now."""
    return records.start_ticks(pid) == start_ticks != 0 and not is_zombie(pid)


def _read(folder: Path, key: Key, reach: LedgerReach, command: str) -> AttemptLedger:
    ledger = AttemptLedger(reach=reach, command=printable(command)[:MAX_SHOWN])
    try:
        found = records.read(folder, records.key_of(*key), last=True)
    except records.UnreadableError as error:
        ledger.problem = str(error)
        return ledger
    for process in found:
        command = printable(" ".join(process.command.split()))[:MAX_SHOWN]
        if not process.slots:
            ledger.processes.append(ProcessRecord(pid=process.pid, command=command))
        for slot in process.slots:
            ledger.processes.append(
                ProcessRecord(
                    pid=process.pid,
                    command=command,
                    marker=slot.marker,
                    begun=slot.begun,
                    ended=slot.ended,
                    abandoned=slot.abandoned,
                    dropped=slot.dropped,
                    closed=slot.closed,
                )
            )
    return ledger
