"""The write-ahead log on disk: append-only segments of checksummed records, replayed at start. Synchronous; commit.py shares its fsyncs.

A record is `length u32 | crc32 u32 | kind u8 | payload`, the checksum over kind and payload. A position counts records from 0 over
all segments; a segment is named by the position of its first record. A record that is torn or damaged at the end of the last
segment was never acknowledged: it is cut off and reported. Damage elsewhere is kept aside as NAME.damaged, and reported.
What records mean does not belong here.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agl_otel.collector import faults
from agl_otel.errors import DataError, InUseError, SettingsError, UnavailableError

SEGMENT_BYTES: Final = 64 << 20
LOCK: Final = "lock"
MAX_RECORD_BYTES: Final = 1 << 30
_HEAD: Final = struct.Struct("<IIB")
_logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """One record as it stands in the log."""

    position: int
    kind: int
    payload: bytes


class Place(NamedTuple):
    """Where a record's payload lies."""

    position: int
    segment: Path
    offset: int
    length: int


@dataclass
class _Segment:
    path: Path
    first: int
    count: int = 0
    size: int = 0


def claim(directory: Path) -> int:
    """Take the log's lock; the returned file descriptor holds it until it is closed. Raises InUseError, SettingsError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise SettingsError(f"cannot use the write-ahead log in {directory}: {error.strerror or error}; see AGL_DATA_DIR") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise InUseError(
            f"the write-ahead log in {directory} is another collector's, which runs: stop it, or give this one an AGL_DATA_DIR of its own"
        ) from None
    return handle


class Log:
    """An open log. Not thread-safe: one thread appends; `read` may be called from any."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.torn_bytes = 0
        """Bytes that were cut off when the log was opened."""
        self._segments: list[_Segment] = []
        self._handle = -1
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for path in sorted(directory.glob("*.wal")):
                self._segments.append(_Segment(path, int(path.stem)))
            for index, segment in enumerate(self._segments):
                self._scan(segment, last=index == len(self._segments) - 1)
            self._open_segment(self._next_position())
        except OSError as error:
            raise SettingsError(f"cannot use the write-ahead log in {directory}: {error.strerror or error}") from None

    @property
    def bytes_held(self) -> int:
        """Size of all segments."""
        return sum(segment.size for segment in self._segments)

    def replay(self) -> Iterator[Record]:
        """Every whole record, in order."""
        for segment in list(self._segments):
            for position, (kind, payload, _) in enumerate(_records(segment.path.read_bytes()), start=segment.first):
                yield Record(position, kind, payload)

    def append(self, records: Sequence[tuple[int, bytes]]) -> list[Place]:
        """Write and fsync `records` as one group. Raises UnavailableError where the disk refuses; then none of them counts."""
        segment = self._segments[-1]
        if segment.size >= self.segment_bytes or self._handle < 0:
            self.turn_over()
            segment = self._segments[-1]
        parts: list[bytes] = []
        places: list[Place] = []
        offset = segment.size
        for kind, payload in records:
            body = bytes((kind,))
            parts += (_HEAD.pack(len(payload), zlib.crc32(payload, zlib.crc32(body)), kind), payload)
            places.append(Place(segment.first + segment.count + len(places), segment.path, offset + _HEAD.size, len(payload)))
            offset += _HEAD.size + len(payload)
        try:
            _write_all(self._handle, parts)
            faults.reach("written")
            os.fdatasync(self._handle)
        except OSError as error:
            self._abandon(segment)
            raise UnavailableError(f"the write-ahead log in {self.directory} cannot be written: {error.strerror or error}") from None
        segment.count += len(records)
        segment.size = offset
        return places

    def read(self, place: Place) -> bytes:
        """The payload at `place`. Raises DataError where it is gone or damaged."""
        with place.segment.open("rb") as file:
            file.seek(place.offset - _HEAD.size)
            data = file.read(_HEAD.size + place.length)
        found = next(_records(data), None)
        if found is None:
            raise DataError(f"record {place.position} of the write-ahead log {place.segment} is damaged")
        return found[1]

    def turn_over(self) -> int:
        """Go on in a new segment; the position at which it begins. Raises UnavailableError where there is no room for it."""
        position = self._next_position()
        if self._segments[-1].count or self._handle < 0:
            try:
                self._open_segment(position)
            except OSError as error:
                raise UnavailableError(f"the write-ahead log in {self.directory} cannot go on: {error.strerror or error}") from None
        return position

    def release(self, position: int) -> None:
        """Delete the segments all of whose records lie before `position`; the open one stays. Raises OSError; then it can be repeated."""
        released = False
        while len(self._segments) > 1 and self._segments[0].first + self._segments[0].count <= position:
            self._segments[0].path.unlink(missing_ok=True)
            self._segments.pop(0)
            released = True
            faults.reach("segment-released")
        if released:
            _sync_directory(self.directory)

    def clear(self) -> None:
        """Forget everything: only where all of it is stored. Positions go on."""
        position = self._next_position()
        if self._segments[-1].count:
            self._open_segment(position)
        self.release(position)

    def close(self) -> None:
        """Close the open segment."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _next_position(self) -> int:
        return self._segments[-1].first + self._segments[-1].count if self._segments else 0

    def _scan(self, segment: _Segment, *, last: bool) -> None:
        data = segment.path.read_bytes()
        for _, _, end in _records(data):
            segment.count += 1
            segment.size = end
        rest = len(data) - segment.size
        if not rest:
            return
        self.torn_bytes += rest
        if last:
            _logger.warning(
                "write-ahead log %s: the last record was torn; cut off %d bytes that were never acknowledged", segment.path, rest
            )
        else:
            segment.path.with_suffix(".damaged").write_bytes(data[segment.size :])
            _logger.error("write-ahead log %s: %d bytes are damaged; kept aside as *.damaged", segment.path, rest)
        os.truncate(segment.path, segment.size)

    def _open_segment(self, first: int) -> None:
        """Append to the segment that begins at `first`. Where that fails (OSError) none is open, and the next append tries again."""
        self.close()
        again = bool(self._segments) and self._segments[-1].first == first
        segment = self._segments[-1] if again else _Segment(self.directory / f"{first:020d}.wal", first)
        handle = os.open(segment.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.ftruncate(handle, segment.size)
            _sync_directory(self.directory)
            faults.reach("segment-opened")
        except OSError:
            os.close(handle)
            raise
        self._handle = handle
        if not again:
            self._segments.append(segment)

    def _abandon(self, segment: _Segment) -> None:
        """After a failed write or fsync nothing is known of this file's tail: cut it off, and go on in a new file."""
        try:
            self.close()
            os.truncate(segment.path, segment.size)
            self._open_segment(segment.first + segment.count)
        except OSError as error:
            _logger.error("write-ahead log %s: cannot start a new segment: %s", segment.path, error)


def _records(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """(kind, payload, end offset) of the whole records from the start of `data`; ends before the first that is not whole."""
    offset = 0
    while offset + _HEAD.size <= len(data):
        length, checksum, kind = _HEAD.unpack_from(data, offset)
        start = offset + _HEAD.size
        if length > MAX_RECORD_BYTES or start + length > len(data):
            return
        payload = data[start : start + length]
        if zlib.crc32(payload, zlib.crc32(bytes((kind,)))) != checksum:
            return
        offset = start + length
        yield kind, payload, offset


def _write_all(handle: int, parts: Sequence[bytes]) -> None:
    view = memoryview(b"".join(parts))
    while view:
        view = view[os.write(handle, view) :]


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
