"""Append-only files of checksummed records (frames), with recovery from a crash, a power loss or a bad disk.

A frame is, little-endian:

    magic    4 bytes  b"AGLF"
    salt     8 bytes  random, one for each file; a copy lies beside the file (NAME.salt)
    position u64      of the record: 0, 1, 2, … over all files of a log
    group    u64      position of the first record of its fsync group
    length   u32      of the payload
    kind     u8       type of the record; 0 (LOST) stands for lost records
    checksum u32      CRC-32 of the header above
    payload  `length` bytes
    checksum u32      CRC-32 of the payload, continued from the header's

A **group** is what one fsync covers; group n + 1 is written only after the fsync of group n. So after a power loss only pages of the last
group may be missing. A bad payload is skipped by its length. After a bad header the next one is searched for by the salt and a higher
position: payloads come from untrusted clients and may contain fake frames, but those cannot have the salt, and a copy of an earlier part
of the same file has lower positions.

An unreadable record is **damage** exactly if a record of a later group follows: its content was on disk. Otherwise it is **torn or
damaged**, and it is unknown whether its group was synced. `mend` moves the bad bytes to another file (NAME.damaged, or
NAME.2.damaged …), reports the loss, and puts a LOST record in their place, so that all other records keep their positions and later
starts know of the gap. Its payload is JSON: `first` (the first missing position; the record's own is the last), `kind` (if the header
was whole), `damage`, `offset` and `size` of the bad bytes, `about` (their description), and `aside` (the file that has them). If a
record is found damaged while its file is open, `save_damaged` copies its bytes.

A file that is never synced (a journal that must survive its process, not its machine) has one group per write; there a power loss, too,
may look like damage. Files are private to their owner. One process appends to a file, one thread at a time; any process may read it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from agl_otel.errors import DataError

LOST: Final = 0
"""The kind of records that stand for lost ones."""
DAMAGED: Final = ".damaged"
"""Suffix of files that hold bad bytes."""
UNFINISHED: Final = ".new"
"""Suffix of the file that `mend` writes; one left by a killed process may be deleted."""
MAGIC: Final = b"AGLF"
SALT_BYTES: Final = 8
_SALT: Final = ".salt"
_HEADER: Final = struct.Struct("<4s8sQQIB")
_SUM: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _SUM.size
_REPORTED: Final = 20  # limit on losses of a file that are listed one by one
_logger = logging.getLogger(__name__)


class Frame(NamedTuple):
    """A whole record."""

    position: int
    group: int
    kind: int
    payload: bytes
    offset: int
    """Offset of its header in the file."""


class Lost(NamedTuple):
    """Records that cannot be read."""

    first: int
    """Position of the first. After the last record of a file their number is unknown: they count as one."""
    last: int
    """Position of the last, inclusive; below `first` if there are bad bytes but no record is missing."""
    kind: int | None
    """The kind of the record, if its header was whole."""
    damage: bool
    """Whether a record of a later group follows."""
    offset: int
    """Offset of the bad bytes in the original file."""
    size: int
    about: str = ""
    """Description of the bad bytes, by `Describe`."""
    aside: str = ""
    """Name of the file that has the bad bytes; empty while they are still in the original file."""

    @property
    def words(self) -> str:
        """The lost records, for messages."""
        if self.last < self.first:
            return f"{self.size} bytes before record {self.first}, which hold no record"
        which = f"record {self.first}" if self.first == self.last else f"records {self.first} to {self.last}"
        return f"{which} ({self.about})" if self.about else which


Describe = Callable[[int | None, bytes], str]
"""(kind of a record or None if its header is bad, the rest of its payload) → its description for the report, or an empty string."""


class _Header(NamedTuple):
    position: int
    group: int
    length: int
    kind: int
    checksum: int


def read(path: Path, *, first: int = 0, end: int | None = None) -> list[Frame | Lost]:
    """Return the records of a file in order, and the losses between them; a missing file has none.

    Args:
        path: the file.
        first: the position of its first record.
        end: the first position of the log's next file, if there is one: then every loss in this file is damage.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return _parse(data, _salt_of(path, data), first, end)


def mend(path: Path, *, first: int = 0, end: int | None = None, describe: Describe | None = None) -> list[Frame | Lost]:
    """Read a file and repair it: move bad bytes to another file, report them, and put LOST records in place of the missing ones.

    `describe` describes the losses for the report; the other arguments and the result are those of `read`. Raises OSError.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    salt = _salt_of(path, data)
    entries = _parse(data, salt, first, end)
    if salt is not None and _read_salt(path) != salt:
        _write_salt(path, salt)
    if not any(isinstance(entry, Lost) and not entry.aside for entry in entries):
        return entries
    damaged = free_name(path)
    new: list[Lost] = []
    whole: list[Frame | Lost] = []
    for entry in entries:
        if isinstance(entry, Lost) and not entry.aside:
            payload = data[entry.offset + HEADER_BYTES : entry.offset + entry.size - _SUM.size]
            entry = entry._replace(about=describe(entry.kind, payload) if describe else "", aside=damaged.name)
            new.append(entry)
        whole.append(entry)
    write_private(damaged, b"".join(data[lost.offset : lost.offset + lost.size] for lost in new))
    _report(path, new, damaged)
    if salt is None:
        _write_salt(path, salt := os.urandom(SALT_BYTES))
    beside = path.with_name(f".{path.name}{UNFINISHED}")
    write_private(beside, b"".join(_again(salt, whole, first)))
    beside.replace(path)
    sync_folder(path.parent)
    return _parse(path.read_bytes(), salt, first, end)


def remove(path: Path) -> None:
    """Delete a file and the copy of its salt, if they exist, but not files with its bad bytes. Raises OSError."""
    path.unlink(missing_ok=True)
    _salt_path(path).unlink(missing_ok=True)


def orphans(folder: Path, pattern: str) -> list[Path]:
    """Return copies of salts without their file (of a name that fits `pattern`); they may be deleted."""
    return [path for path in folder.glob(f"{pattern}{_SALT}") if not path.with_suffix("").exists()]


class FramedFile:
    """A file open for appending. Methods raise OSError if the disk fails; a new file that cannot be set up is removed.

    Args:
        path: created if missing; an existing file must be whole (`mend`).
        next_position: the position of the next record.
    """

    def __init__(self, path: Path, next_position: int = 0) -> None:
        self.path = path
        self.next_position = next_position
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.size = -1
        try:
            self.size = os.fstat(self._handle).st_size
            salt = _salt_of(path, os.pread(self._handle, HEADER_BYTES, 0)) if self.size else None
            if salt is None:
                salt = os.urandom(SALT_BYTES)
                _write_salt(path, salt)  # before the first frame
                sync_folder(path.parent)
            self._salt = salt
        except OSError:
            if self.size == 0:
                self.discard()
            self.close()
            raise

    @classmethod
    def mended(cls, path: Path, *, describe: Describe | None = None) -> tuple[FramedFile, list[Frame | Lost]]:
        """Mend and open a file that is a whole log; return it with its records."""
        entries = mend(path, describe=describe)
        return cls(path, next_position(entries)), entries

    def write(self, records: Sequence[tuple[int, bytes]]) -> list[tuple[int, int]]:
        """Append records (kind, payload) as one group, without an fsync; return (position, offset) of each.

        On an OSError none of them is in the file.
        """
        group = self.next_position
        parts: list[bytes] = []
        places: list[tuple[int, int]] = []
        offset = self.size
        for position, (kind, payload) in enumerate(records, start=group):
            places.append((position, offset))
            parts += frame(self._salt, position, group, kind, payload)
            offset += HEADER_BYTES + len(payload) + _SUM.size
        try:
            _write_all(self._handle, b"".join(parts))
        except OSError:
            self.cut(self.size, group)
            raise
        self.size = offset
        self.next_position = group + len(records)
        return places

    def sync(self) -> None:
        """Sync all written records to disk. After an error their state is unknown: `cut`, and continue in another file."""
        os.fdatasync(self._handle)

    def cut(self, size: int, next_position: int) -> None:
        """Truncate the file to an earlier size."""
        self.next_position = next_position
        try:
            os.ftruncate(self._handle, size)
        finally:
            self.size = os.fstat(self._handle).st_size

    def discard(self) -> None:
        """Close the file and delete it if the disk allows."""
        self.close()
        with contextlib.suppress(OSError):
            remove(self.path)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def next_position(entries: Sequence[Frame | Lost], first: int = 0) -> int:
    """Return the position after these records of a file that begins at `first`."""
    if not entries:
        return first
    end = entries[-1]
    return end.position + 1 if isinstance(end, Frame) else max(end.last + 1, end.first)


def read_at(path: Path, offset: int, position: int) -> bytes:
    """Return the payload of the record `position`, whose header is at `offset`. Raises DataError if it is missing or damaged, OSError."""
    with path.open("rb") as file:
        file.seek(offset)
        head = file.read(HEADER_BYTES)
        header = _header(head, 0, head[len(MAGIC) : len(MAGIC) + SALT_BYTES])
        if header is not None and header.position == position:
            rest = file.read(header.length + _SUM.size)
            payload = rest[: header.length]
            if rest[header.length :] == _SUM.pack(zlib.crc32(payload, header.checksum)):
                return payload
    raise DataError(f"record {position} of {path} is damaged: its bytes are moved to another file when this one is opened again")


def save_damaged(path: Path, offset: int, position: int, length: int, *, describe: Describe | None = None) -> int:
    """Copy the bytes of a record that `read_at` found damaged to a file, and report the loss; return the number of bytes.

    The original file is left for `mend`, since a process may be appending to it. Raises OSError.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(HEADER_BYTES + length + _SUM.size)
    header = _header(data, 0, data[len(MAGIC) : len(MAGIC) + SALT_BYTES])
    kind = header.kind if header is not None and header.position == position else None
    about = describe(kind, data[HEADER_BYTES : HEADER_BYTES + length]) if describe else ""
    damaged = free_name(path)
    write_private(damaged, data)
    sync_folder(path.parent)
    _report(path, [Lost(position, position, kind, True, offset, len(data), about, damaged.name)], damaged)
    return len(data)


def frame(salt: bytes, position: int, group: int, kind: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the parts of a record: header, payload and the payload's checksum."""
    header = _HEADER.pack(MAGIC, salt, position, group, len(payload), kind)
    checksum = zlib.crc32(header)
    return header + _SUM.pack(checksum), payload, _SUM.pack(zlib.crc32(payload, checksum))


def write_private(path: Path, data: bytes) -> None:
    """Write a private file and sync it to disk. Raises OSError."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(handle, data)
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Sync the content of a file to disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Sync the entries of a folder to disk. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _parse(data: bytes, salt: bytes | None, first: int, end: int | None) -> list[Frame | Lost]:
    """Parse as `read` does; without a known salt (None) nothing can be read."""
    entries: list[Frame | Lost] = []
    offset, expected, last_group = 0, first, first
    while offset < len(data):
        at, header = _next_header(data, offset, salt, expected)
        if header is None or (end is not None and header.position >= end):  # positions from `end` on belong to the next file
            entries.append(Lost(expected, expected if end is None else end - 1, None, False, offset, len(data) - offset))
            expected = end or expected
            break
        payload_at = at + HEADER_BYTES
        sum_at = payload_at + header.length
        beyond = min(sum_at + _SUM.size, len(data))
        payload = data[payload_at:sum_at]
        entry: Frame | Lost | None = Frame(header.position, header.group, header.kind, payload, at)
        if data[sum_at:beyond] != _SUM.pack(zlib.crc32(payload, header.checksum)):
            entry = None
        elif header.kind == LOST:
            entry = _lost_before(header.position, payload)
        entry = entry or Lost(header.position, header.position, header.kind, False, at, beyond - at)
        begins = entry.position if isinstance(entry, Frame) else entry.first
        if at > offset or begins > expected:
            entries.append(Lost(expected, begins - 1, None, False, offset, at - offset))
        entries.append(entry)
        offset, expected = beyond, header.position + 1
        last_group = max(last_group, header.group)
    if end is not None and expected < end:
        entries.append(Lost(expected, end - 1, None, False, len(data), 0))
    later = end is not None
    return [
        entry._replace(damage=later or entry.first < last_group) if isinstance(entry, Lost) and not entry.aside else entry
        for entry in entries
    ]


def _next_header(data: bytes, offset: int, salt: bytes | None, expected: int) -> tuple[int, _Header | None]:
    """Find the next whole header at or after `offset`; return its offset and content."""
    if salt is None:
        return len(data), None
    mark = MAGIC + salt
    while offset >= 0:
        header = _header(data, offset, salt)
        if header is not None and header.position >= expected:
            return offset, header
        offset = data.find(mark, offset + 1)
    return len(data), None


def _header(data: bytes, offset: int, salt: bytes) -> _Header | None:
    if offset + HEADER_BYTES > len(data):
        return None
    magic, found, position, group, length, kind = _HEADER.unpack_from(data, offset)
    checksum = zlib.crc32(data[offset : offset + _HEADER.size])
    if magic != MAGIC or found != salt or group > position or _SUM.unpack_from(data, offset + _HEADER.size)[0] != checksum:
        return None
    return _Header(position, group, length, kind, checksum)


def _lost_before(position: int, payload: bytes) -> Lost | None:
    """Parse the payload of a LOST record; None if it is invalid."""
    try:
        about: dict[str, Any] = json.loads(payload)
        if not all(isinstance(about[name], int) for name in ("first", "offset", "size")) or not about["aside"]:
            return None
        return Lost(last=position, **about)
    except (ValueError, TypeError, KeyError):
        return None


def _again(salt: bytes, entries: Iterable[Frame | Lost], group: int) -> Iterator[bytes]:
    """Yield the bytes of a file with these records."""
    for entry in entries:
        if isinstance(entry, Frame):
            group = entry.group
            yield from frame(salt, entry.position, group, entry.kind, entry.payload)
        elif entry.last >= entry.first:
            about = {name: value for name, value in entry._asdict().items() if name != "last"}
            yield from frame(salt, entry.last, group, LOST, json.dumps(about).encode())


def _report(path: Path, lost: Sequence[Lost], target: Path) -> None:
    for damage, level, what in (
        (True, logging.ERROR, "damaged, lost"),
        (False, logging.WARNING, "torn or damaged; it is unknown whether it was acknowledged"),
    ):
        mine = [each for each in lost if each.damage == damage]
        if mine:
            names = ", ".join(each.words for each in mine[:_REPORTED])
            more = f" and {len(mine) - _REPORTED} more places" if len(mine) > _REPORTED else ""
            size = sum(each.size for each in mine)
            _logger.log(level, "%s: %s: %s%s; %d bytes are kept in %s", path, what, names, more, size, target)


def free_name(path: Path) -> Path:
    """Return an unused name beside `path` for bad bytes."""
    damaged, number = path.with_name(path.name + DAMAGED), 1
    while damaged.exists():
        number += 1
        damaged = path.with_name(f"{path.name}.{number}{DAMAGED}")
    return damaged


def _salt_path(path: Path) -> Path:
    return path.with_name(path.name + _SALT)


def _salt_of(path: Path, data: bytes) -> bytes | None:
    """Return the salt of a file, from its first header or, if that is bad, from the copy."""
    salt = data[len(MAGIC) : len(MAGIC) + SALT_BYTES]
    return salt if _header(data, 0, salt) is not None else _read_salt(path)


def _read_salt(path: Path) -> bytes | None:
    try:
        data = _salt_path(path).read_bytes()
    except FileNotFoundError:
        return None
    salt = data[:SALT_BYTES]
    return salt if data[SALT_BYTES:] == _SUM.pack(zlib.crc32(salt)) and len(salt) == SALT_BYTES else None


def _write_salt(path: Path, salt: bytes) -> None:
    write_private(_salt_path(path), salt + _SUM.pack(zlib.crc32(salt)))


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
