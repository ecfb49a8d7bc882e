"""The files in which processes count their spans, readable after the processes have ended (the ledger of an attempt).

A runner has a root folder, and in it makes a folder for each attempt, named by a hash of its ids. A process under the hook creates one file
with a slot for each attempt that it works for, hard-linked into the folder of each of these attempts. The counts are in a memory mapping of
the file, so they survive any end of the process. A file has 8,192 bytes (native byte order):

    0     magic "AGLLDGR1"; pid; start of the process in clock ticks (as in /proc/PID/stat); length of the command; the command (UTF-8)
    3072  64 bytes, one for each slot: not 0 once the reader has read the slot; spans that begin after that are late
    3136  64 bytes, one for each slot: errno if a fork of the process began a span of the slot's attempt and had no record of it, else 0
    3200  1 byte: the same for attempts without a slot
    4096  64 slots of 8 words of 64 bits: key of the attempt (2), marker, begun, ended, abandoned, dropped, closed

The file is allocated in full before it is mapped: on a full disk, a hole in it would be a SIGBUS in the agent. It is never truncated.

A process that cannot create a file (no descriptor left, a limit on files) creates a folder instead, PID-TICKS-MARKER-ERRNO.failed, which
needs neither. A fork that cannot do that either sets a byte in the mapped file of its parent (or nearest ancestor with one); so does a
process that has entered a chroot or mount namespace in which the folder's path leads nowhere, or to another folder.
Standard library only: this runs in the agent's process.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import struct
import sys
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

FILE_BYTES: Final = 8192
SLOTS: Final = 64
MAX_FILES: Final = 4096
"""Limit on the files of one attempt; a folder with more is not read."""
MAX_COMMAND_BYTES: Final = 1000
CONTAINER_ROOT: Final = "/run/agl-ledger"
"""The root of ledgers in a container."""
FILE_SUFFIX: Final = ".ledger"
NO_RECORD_SUFFIX: Final = ".failed"
_NO_RECORD: Final = re.compile(r"(\d{1,10})-(\d{1,19})-([0-9a-f]{16})-(\d{1,3})\.failed")
_MAGIC: Final = b"AGLLDGR1"
_HEADER: Final = struct.Struct("=8sQQQ")
_READ: Final = 3072
_FORKS: Final = _READ + SLOTS
_SLOTS: Final = 4096
_WORDS: Final = 8
_Identity = tuple[int, int]
"""(device, inode)."""
_KEY0, _KEY1, _MARKER, _BEGUN, _ENDED, _ABANDONED, _DROPPED, _CLOSED = range(_WORDS)


def key_of(rollout_id: str, attempt_id: str) -> bytes:
    """Return the 16 bytes that identify an attempt in files and folder names."""
    return sha256(f"{rollout_id}/{attempt_id}".encode()).digest()[:16]


def folder_of(root: str | Path, rollout_id: str, attempt_id: str) -> Path:
    """Return the folder of an attempt's ledger."""
    return Path(root) / key_of(rollout_id, attempt_id).hex()


def find_root(rollout_id: str, attempt_id: str) -> Path | None:
    """Find the root that has a folder for the attempt, for a process whose environment has lost AGL_LEDGER; None where none has."""
    name = key_of(rollout_id, attempt_id).hex()
    own = Path(os.environ.get("TMPDIR") or "/tmp", own_folder_name())
    with contextlib.suppress(OSError):
        return next((root for root in (Path(CONTAINER_ROOT), *own.iterdir()) if (root / name).is_dir()), None)
    return None


def own_folder_name() -> str:
    """Return the name of this user's folder of roots in the folder for temporary files."""
    return f"agl-otel-{os.getuid()}"


class Slot:
    """The counts of one attempt in this process's file. Not thread-safe: its owner, the ledger, holds a lock."""

    __slots__ = ("_base", "_file", "_number", "_words")

    def __init__(self, file: RecordFile, number: int) -> None:
        self._file = file
        self._number = number
        self._words = file.words
        self._base = _SLOTS // 8 + number * _WORDS

    def open(self, key: bytes, marker: str) -> None:
        """Assign the slot to an attempt and a marker of 16 hex digits. The key is written last, which makes the slot valid."""
        words, base = self._words, self._base
        self._file.read_flags[self._number] = 0
        self._file.forks.errnos[self._number] = 0
        words[base + _MARKER] = int(marker, 16)
        for place in (_BEGUN, _ENDED, _ABANDONED, _DROPPED, _CLOSED):
            words[base + place] = 0
        words[base + _KEY1] = int.from_bytes(key[8:], sys.byteorder)
        words[base + _KEY0] = int.from_bytes(key[:8], sys.byteorder)

    def write(self, begun: int, ended: int, abandoned: int, dropped: int) -> None:
        """Write the counts, `begun` first: a reader never sees more spans ended than begun."""
        words, base = self._words, self._base
        words[base + _BEGUN] = begun
        words[base + _ENDED] = ended
        words[base + _ABANDONED] = abandoned
        words[base + _DROPPED] = dropped

    def begun(self, count: int) -> bool:
        """Write how many spans have begun, and that the slot is open. Return whether the slot was read: then the last span is late."""
        words, base = self._words, self._base
        words[base + _BEGUN] = count
        words[base + _CLOSED] = 0
        return self.is_read  # checked after writing: the reader has seen the span, or it is late

    def ended(self, count: int) -> None:
        """Write how many spans have ended."""
        self._words[self._base + _ENDED] = count

    def closed(self, *, closed: bool) -> None:
        """Write whether the process has closed the attempt in order."""
        self._words[self._base + _CLOSED] = int(closed)

    @property
    def is_read(self) -> bool:
        """Whether the reader has read the slot; spans that begin after that are late."""
        return self._file.read_flags[self._number] != 0

    def free(self) -> None:
        """Clear the key and release the slot for another attempt."""
        self._words[self._base + _KEY0] = 0
        self._words[self._base + _KEY1] = 0
        self._file.release(self._number)


class Forks(NamedTuple):
    """What forks of a process may use of its file."""

    words: memoryview
    """The whole file, read-only."""
    errnos: memoryview
    path: Path
    """Where the file was created."""
    identity: _Identity

    def has_file_in(self, folder: Path, key: bytes) -> bool:
        """Return whether the file was put into the folder of an attempt."""
        return self.path.parent == folder or bool(_numbers(self.words, key))

    def set(self, key: bytes, number: int) -> None:
        """Write the errno with which a fork failed to create a record of the attempt. Forks may overwrite each other's."""
        numbers = _numbers(self.words, key)
        self.errnos[numbers[0] if numbers else SLOTS] = number


class RecordFile:
    """A memory-mapped file of this process."""

    def __init__(self, folder: Path) -> None:
        """Create the file in `folder`. Raises OSError."""
        self.name = f"{os.getpid()}-{secrets.token_hex(8)}{FILE_SUFFIX}"
        self.path = folder / self.name
        command = own_command().encode(errors="replace")[:MAX_COMMAND_BYTES]
        header = _HEADER.pack(_MAGIC, os.getpid(), start_ticks(os.getpid()), len(command)) + command
        hidden = folder / f".{self.name}"  # renamed when complete: a reader never sees half a file
        fd = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            _take_space(fd)
            os.pwrite(fd, header, 0)
            found = os.fstat(fd)
            self._map = mmap.mmap(fd, FILE_BYTES)
            hidden.rename(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                hidden.unlink()
            raise
        finally:
            os.close(fd)
        self.words = memoryview(self._map).cast("Q")
        self.read_flags = memoryview(self._map)[_READ : _READ + SLOTS]
        errnos = memoryview(self._map)[_FORKS : _FORKS + SLOTS + 1]
        self.forks = Forks(self.words.toreadonly(), errnos, self.path, (found.st_dev, found.st_ino))
        self._free = list(range(SLOTS - 1, -1, -1))

    def slot(self, key: bytes, marker: str) -> Slot | None:
        """Return a slot for an attempt; None where all are taken."""
        if not self._free:
            return None
        slot = Slot(self, self._free.pop())
        slot.open(key, marker)
        return slot

    def link(self, folder: Path, *, stays: bool) -> None:
        """Link the file into the folder of another attempt. `stays`: its own folder outlives attempts. Raises OSError."""
        if not (folder / self.name).exists():
            os.link(self.path, folder / self.name)
            if not stays:
                self.path = folder / self.name

    def release(self, number: int) -> None:
        """Mark a slot as free."""
        self._free.append(number)


class Records:
    """The files of this process below the roots of its runners. Not thread-safe: the ledger holds a lock."""

    def __init__(self, root: str) -> None:
        self._roots: list[Path] = []
        self._identities: dict[Path, _Identity] = {}
        """Those of roots, also as the parent process found them before the fork."""
        self._home: Path | None = None
        self._file: RecordFile | None = None
        self._forks: Forks | None = None
        """That of this process's file; until it has one, that of its nearest ancestor (by fork) with a file."""
        self.add(root, is_own=False)

    def add(self, root: str, *, is_own: bool) -> None:
        """Add a root. `is_own`: of this process's own runner; its file is kept there, as attempts' folders come and go."""
        if Path(root) not in self._roots:
            self._roots.append(Path(root))
            with contextlib.suppress(OSError):
                if (identity := _identity(Path(root))) is not None:
                    self._identities[Path(root)] = identity
        if is_own:
            self._home = Path(root)

    def forked_from(self, records: Records) -> None:
        """Take over what the parent process's `records` know of its file and its roots."""
        self._forks = records._forks
        self._identities |= records._identities

    def loaded(self, rollout_id: str, attempt_id: str) -> None:
        """Record that the hook is loaded in this process, which works for an attempt. Raises OSError."""
        if self._file is None:
            self._make_file(self._folder(rollout_id, attempt_id))

    def slot(self, rollout_id: str, attempt_id: str, marker: str) -> Slot:
        """Return a new slot for an attempt.

        Raises FileNotFoundError where the runner has no folder for it, and an OSError, after leaving a mark for the reader, where no file
        can be created in that folder.
        """
        key, folder = key_of(rollout_id, attempt_id), self._folder(rollout_id, attempt_id)
        try:
            if self._is_displaced(folder, key):
                if self._forks is not None:
                    self._forks.set(key, errno.ENOENT)
                raise FileNotFoundError(errno.ENOENT, "the runner's folder is not at its path", str(folder))
            return self._slot(key, folder, marker)
        except FileNotFoundError:
            raise
        except OSError as error:
            self._mark_unrecorded(key, folder, marker, error.errno or errno.EIO)
            raise

    def _slot(self, key: bytes, folder: Path, marker: str) -> Slot:
        file = self._file
        slot = None
        if file is not None:
            try:
                file.link(folder, stays=file.path.parent == self._home)
                slot = file.slot(key, marker)
            except OSError:  # the file's folder is gone, or this one is on another disk or does not exist
                slot = None
        if slot is None:
            slot = self._make_file(folder).slot(key, marker)
            assert slot is not None, "a new file has room"
        return slot

    def _make_file(self, folder: Path) -> RecordFile:
        file = self._file = self._new_file(folder)
        self._forks = file.forks
        return file

    def _new_file(self, folder: Path) -> RecordFile:
        if self._home is None:
            return RecordFile(folder)
        if self._file is not None and self._file.path.parent == self._home:
            self._file.path.unlink(missing_ok=True)  # attempts in flight have links to it in their folders
        file = RecordFile(self._home)
        file.link(folder, stays=True)
        return file

    def _is_displaced(self, folder: Path, key: bytes) -> bool:
        """Return whether the runner's folder is no longer at the path at which this process or an ancestor has found it."""
        forks = self._forks
        if forks is not None and forks.has_file_in(folder, key) and _identity(folder) is not None:
            return _identity(folder / forks.path.name) != forks.identity
        root = self._identities.get(folder.parent)  # below it, a folder may be missing: attempts elsewhere have none
        return root is not None and _identity(folder.parent) != root

    def _mark_unrecorded(self, key: bytes, folder: Path, marker: str, number: int) -> None:
        """Leave a mark that this process has no record of an attempt."""
        pid = os.getpid()
        try:
            (folder / f"{pid}-{start_ticks(pid)}-{marker}-{number}{NO_RECORD_SUFFIX}").mkdir()
        except OSError:
            if self._forks is not None:
                self._forks.set(key, number)

    def _folder(self, rollout_id: str, attempt_id: str) -> Path:
        folders = [folder_of(root, rollout_id, attempt_id) for root in self._roots]
        return next((folder for folder in folders[1:] if folder.is_dir()), folders[0])


def _identity(path: Path) -> _Identity | None:
    """Return device and inode of a file or folder; None if there is none. Raises OSError."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


_command = ""


def set_command(command: str) -> None:
    """Set the command of this process and its forks: after a change of program without exec, /proc still has the old one."""
    global _command
    _command = command


def own_command() -> str:
    """Return the command line of this process, for display."""
    if _command:
        return _command
    try:
        arguments = Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        return " ".join(argument.decode(errors="replace") for argument in arguments)
    except OSError:
        return " ".join([sys.executable, *sys.argv])


def _take_space(fd: int) -> None:
    """Have the disk space of a record allocated: a write to a mapped page for which there is none would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, FILE_BYTES)
    else:  # macOS
        os.pwrite(fd, bytes(FILE_BYTES), 0)


def start_ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 where there is no such process, or no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReadSlot:
    """The counts of one attempt in one process, and the number of their slot."""

    number: int
    marker: str
    begun: int
    ended: int
    abandoned: int
    dropped: int
    closed: bool


@dataclass(frozen=True, slots=True)
class NoRecord:
    """Why a process that began a span could create no file, and the marker of its spans."""

    marker: str
    errno: int


@dataclass(frozen=True, slots=True)
class ReadProcess:
    """A process that created a file for an attempt, or failed to."""

    pid: int
    start_ticks: int
    command: str
    slot: ReadSlot | None = None
    """Its counts of the requested attempt; None where it only loaded the hook."""
    no_record: NoRecord | None = None
    fork_errno: int = 0
    """Why a fork of it that began a span of the attempt could create no file; 0 where there is no such fork."""


class UnreadableError(Exception):
    """A ledger that cannot be read, or that holds what no hook writes."""


def read(folder: Path, key: bytes, *, last: bool = False) -> list[ReadProcess]:
    """Read the counts of an attempt's processes; with `last`, spans that begin from now on are late.

    The agent may write to the folder: links are not followed, reading does not block, and only well-formed files are accepted.
    Raises UnreadableError.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnreadableError(f"its folder {folder} is gone") from None
    except OSError as error:
        raise UnreadableError(f"its folder {folder}: {error.strerror}") from None
    try:
        return [_without_record(name) if name.endswith(NO_RECORD_SUFFIX) else _read_file(fd, name, key, last=last) for name in _names(fd)]
    except OSError as error:
        raise UnreadableError(f"its folder {folder}: {error.strerror}") from None
    finally:
        os.close(fd)


def _names(folder: int) -> list[str]:
    names: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((FILE_SUFFIX, NO_RECORD_SUFFIX)) and not entry.name.startswith("."):
                names.append(entry.name)
                if len(names) > MAX_FILES:
                    raise UnreadableError(f"it has more than {MAX_FILES} files")
    return sorted(names)


def _without_record(name: str) -> ReadProcess:
    found = _NO_RECORD.fullmatch(name)
    if found is None:
        raise UnreadableError(f"{name!a} was not written by the hook")
    return ReadProcess(int(found[1]), int(found[2]), "", no_record=NoRecord(found[3], int(found[4])))


def _read_file(folder: int, name: str, key: bytes, *, last: bool) -> ReadProcess:
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, os.O_RDONLY | flags, dir_fd=folder)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != FILE_BYTES:
                raise UnreadableError(f"{name!a} is no file of {FILE_BYTES} bytes")
            process = _parse(_contents(fd, name), name, key)
            if last and process.slot is not None:
                _mark_read(folder, name, process.slot.number)
                # Read again for spans begun before the process saw the mark. A slot freed since then keeps its counts until its reuse.
                again = _slot(_contents(fd, name), process.slot.number)
                if again.marker == process.slot.marker:
                    process = replace(process, slot=again)
        finally:
            os.close(fd)
    except OSError as error:
        raise UnreadableError(f"{name!a}: {error.strerror}") from None
    return process


def _contents(fd: int, name: str) -> bytes:
    data = os.pread(fd, FILE_BYTES, 0)
    if len(data) != FILE_BYTES:
        raise UnreadableError(f"{name!a} was cut")
    return data


def _parse(data: bytes, name: str, key: bytes) -> ReadProcess:
    magic, pid, ticks, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or length > MAX_COMMAND_BYTES:
        raise UnreadableError(f"{name!a} was not written by the hook")
    command = data[_HEADER.size : _HEADER.size + length].decode(errors="replace")
    numbers = _numbers(memoryview(data).cast("Q"), key)
    if len(numbers) > 1:  # no hook writes that: a slot loses its key before its attempt gets another slot
        raise UnreadableError(f"{name!a} counts the attempt {len(numbers)} times")
    fork_errno = data[_FORKS + SLOTS] or (data[_FORKS + numbers[0]] if numbers else 0)
    return ReadProcess(pid, ticks, command, _slot(data, numbers[0]) if numbers else None, fork_errno=fork_errno)


def _numbers(words: memoryview, key: bytes) -> list[int]:
    """Return the numbers of an attempt's slots, given the words of a file."""
    first, second = int.from_bytes(key[:8], sys.byteorder), int.from_bytes(key[8:], sys.byteorder)
    places = range(_SLOTS // 8, FILE_BYTES // 8, _WORDS)
    return [number for number, base in enumerate(places) if words[base + _KEY0] == first and words[base + _KEY1] == second]


def _slot(data: bytes, number: int) -> ReadSlot:
    base = _SLOTS + 8 * (number * _WORDS + _MARKER)
    marker, begun, ended, abandoned, dropped, closed = memoryview(data)[base : base + 8 * (_WORDS - _MARKER)].cast("Q").tolist()
    return ReadSlot(number, f"{marker:016x}", begun, ended, abandoned, dropped, bool(closed))


def _mark_read(folder: int, name: str, number: int) -> None:
    with contextlib.suppress(OSError):  # the file of a container's own user: its processes have ended, so nothing is late
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        try:
            os.pwrite(fd, b"\1", _READ + number)
        finally:
            os.close(fd)
