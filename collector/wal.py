"""The write-ahead log on disk: segments of framed records (framed.py), replayed at start. Synchronous; commit.py shares its fsyncs.

A position counts records from 0 over all segments; a segment is named by the position of its first record. The meaning of records does not
belong here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from agl_otel.collector import faults
from agl_otel.errors import DataError, SettingsError, UnavailableError, unwritable
from agl_otel.service import framed
from agl_otel.service.disk import try_disk
from agl_otel.service.framed import Describe, FramedFile, Lost
from agl_otel.service.lock import FileLock

SEGMENT_BYTES: Final = 64 << 20
SEGMENT: Final = ".wal"
LOCK: Final = "lock"
_logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """One record of the log."""

    position: int
    kind: int
    payload: bytes


class Place(NamedTuple):
    """Location of a record."""

    position: int
    segment: Path
    offset: int
    length: int
    """Length of the payload, in bytes."""


@dataclass
class _Segment:
    path: Path
    first: int
    next: int
    size: int


def claim(directory: Path) -> FileLock:
    """Take the log's lock. Raises InUseError, SettingsError."""
    return FileLock.hold(
        directory / LOCK,
        what=f"the write-ahead log in {directory}",
        taken=lambda pid: (
            f"the write-ahead log in {directory} is another collector's, which runs (pid {pid}): "
            "stop it, or give this one an AGL_DATA_DIR of its own"
        ),
    )


class Log:
    """An open log. Not thread-safe: one thread appends; `read` may be called from any.

    Args:
        directory: created if missing.
        segment_bytes: size from which on a new segment is started.
        describe: describes a lost record in words.
    """

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, describe: Describe | None = None) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.torn_bytes = 0
        """Bytes of the last group that were torn or damaged when the log was opened."""
        self.damaged_bytes = 0
        """Bytes of earlier groups that were damaged when the log was opened, or when they were read since."""
        self._describe = describe
        self._segments: list[_Segment] = []
        self._next = 0
        self._file: FramedFile | None = None
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._load()
            self._open_segment()
        except OSError as error:
            raise SettingsError(f"cannot use the write-ahead log in {directory}: {error.strerror or error}") from None

    @property
    def bytes_held(self) -> int:
        """Size of all segments, in bytes."""
        return sum(segment.size for segment in self._segments)

    def replay(self) -> Iterator[Record | Lost]:
        """Yield all records in order, and a Lost where some are missing."""
        for segment in list(self._segments):
            for entry in framed.read(segment.path, first=segment.first, end=segment.next):
                yield entry if isinstance(entry, Lost) else Record(entry.position, entry.kind, entry.payload)

    def append(self, records: Sequence[tuple[int, bytes]]) -> list[Place]:
        """Write and fsync `records` as one group. Raises UnavailableError if the disk refuses; the log has none of them then."""
        if self._file is None or self._file.size >= self.segment_bytes:
            self.rotate()
        file, segment = self._file, self._segments[-1]
        assert file is not None  # rotate has opened one
        try:
            places = file.write(records)
            faults.failpoint("written")
            file.sync()
        except OSError as error:
            self._abandon(file, segment)
            raise self._refused(error) from None
        self._next = segment.next = file.next_position
        segment.size = file.size
        return [
            Place(position, segment.path, offset, len(payload)) for (position, offset), (_, payload) in zip(places, records, strict=True)
        ]

    def read(self, place: Place) -> bytes:
        """Return the payload at `place`.

        Raises UnavailableError if it cannot be read now, and DataError if it is damaged: its bytes are then moved to a file of their own,
        and logged.
        """
        try:
            try:
                return framed.read_at(place.segment, place.offset, place.position)
            except DataError:
                self.damaged_bytes += framed.save_damaged(
                    place.segment, place.offset, place.position, place.length, describe=self._describe
                )
                raise
        except OSError as error:
            raise UnavailableError(f"the write-ahead log in {self.directory} cannot be read: {error.strerror or error}") from None

    def rotate(self) -> int:
        """Start a new segment and return its first position. Raises UnavailableError if there is no space for it."""
        if self._file is None or self._segments[-1].first < self._next:
            try:
                self._open_segment()
            except OSError as error:
                raise self._refused(error) from None
        return self._next

    def try_disk(self, size: int) -> None:
        """Write and sync `size` zero bytes beside the log. Raises UnavailableError if the disk refuses them."""
        try:
            try_disk(self.directory, size)
        except OSError as error:
            raise self._refused(error) from None

    def release(self, position: int) -> None:
        """Delete the segments, except the open one, of which every record lies before `position`. Raises OSError; it may be repeated."""
        released = False
        while len(self._segments) > 1 and self._segments[0].next <= position:
            framed.remove(self._segments[0].path)
            self._segments.pop(0)
            released = True
            faults.failpoint("segment-released")
        if released:
            framed.sync_folder(self.directory)

    def clear(self) -> None:
        """Delete all records; call it only if all of them are stored. Positions continue."""
        if self._segments[-1].first < self._next:
            self._open_segment()
        self.release(self._next)

    def close(self) -> None:
        """Close the open segment."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _refused(self, error: OSError) -> UnavailableError:
        return UnavailableError(unwritable(f"the write-ahead log in {self.directory}", error))

    def _load(self) -> None:
        """Mend the existing segments, and sync what was written but not synced before a crash: it is part of the log now."""
        kept = {path.name for path in self.directory.glob(f"*{framed.DAMAGED}")}
        paths = sorted(self.directory.glob(f"*{SEGMENT}"))
        firsts = [int(path.stem) for path in paths]
        for path, first, end in zip(paths, firsts, [*firsts, None][1:], strict=True):
            entries = framed.mend(path, first=first, end=end, describe=self._describe)
            new = [entry for entry in entries if isinstance(entry, Lost) and entry.aside not in kept]
            self.damaged_bytes += sum(lost.size for lost in new if lost.damage)
            self.torn_bytes += sum(lost.size for lost in new if not lost.damage)
            self._next = framed.next_position(entries, first)
            self._segments.append(_Segment(path, first, self._next, path.stat().st_size))
        if paths:
            framed.sync_file(paths[-1])
        for left in (*self.directory.glob(f".*{framed.UNFINISHED}"), *framed.orphans(self.directory, f"*{SEGMENT}")):
            left.unlink(missing_ok=True)

    def _open_segment(self) -> None:
        """Append to a new segment from now on. If that fails (OSError) no segment is open, and the next append tries again."""
        self.close()
        path = self.directory / f"{self._next:020d}{SEGMENT}"
        file = FramedFile(path, self._next)
        try:
            file.cut(0, self._next)  # discard old contents of the file
            faults.failpoint("segment-opened")
        except OSError:
            file.close()
            raise
        self._file = file
        if self._segments and self._segments[-1].path == path:
            self._segments.pop()
        self._segments.append(_Segment(path, self._next, self._next, 0))

    def _abandon(self, file: FramedFile, segment: _Segment) -> None:
        """Cut off the tail of a file after a failed write or fsync, since its state is unknown, and continue in a new file."""
        try:
            file.cut(segment.size, segment.next)
            self._open_segment()
        except OSError as error:
            self.close()
            _logger.error("write-ahead log %s: cannot start a new segment: %s", segment.path, error)
