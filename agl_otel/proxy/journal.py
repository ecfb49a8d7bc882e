"""The proxy's journal: each call of an attempt is on disk before its answer is complete, so that calls lost by a crash are noticed.

A START record is written before a request is forwarded, an END record, with the call's spans as they are exported, before the last byte
of its answer is sent. Neither is synced: both survive a crash of the process, not of the machine. The files are segments (framed.py). A
segment whose spans were all acknowledged by the collector is removed once a newer one exists; entries that are still needed (calls in
flight, counts of attempts that are not closed) are first copied to the newer one.

A record's payload is `size u32 | head (JSON) | data`. HEAD: [boot id, size of the resource], then resource and scope (wire.py). START, END,
COUNT and CLOSED (the attempt is closed, and all of it stored): [rollout, attempt, marker, trace id, parent's span id, spans ended so far,
dropped, the call's span id], then END's spans. SETTLED (acknowledged or given up by the exporter): [no rollout], then span ids of calls.

A write error, such as a full disk, fails no call. The attempt then counts a dropped span, and the file `whole` is renamed to `lossy`, which
works on a full disk, too: it tells later readers of the journal (recovery.py) that records are missing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from pydantic_core import to_json

from agl_otel.adapters.otlp_masking import Masker
from agl_otel.errors import DataError, UnavailableError, unwritable
from agl_otel.service.framed import Frame, FramedFile, read, remove
from agl_otel.service.lock import FileLock
from agl_otel_hook.context import Key
from agl_otel_hook.ledger import Ledger, Place
from agl_otel_hook.whole import Begun, WholeSpan
from agl_otel_hook.wire import field_of, of_parts

HEAD: Final = 1
START: Final = 2
END: Final = 3
COUNT: Final = 4
CLOSED: Final = 5
SETTLED: Final = 6
FOLDER: Final = "proxy"
"""Below the data directory; has a folder for each running proxy, and for each dead one whose journal is not recovered yet."""
SUFFIX: Final = ".calls"
LOCK: Final = "lock"
WHOLE: Final = "whole"
LOSSY: Final = "lossy"
SEGMENT_BYTES: Final = 8 << 20
TIDY_SECONDS: Final = 1.0
_SIZE: Final = struct.Struct("<I")
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_logger = logging.getLogger("agl_otel.proxy")


@dataclass(slots=True, eq=False)
class _Segment:
    file: FramedFile
    records: int = 0
    """Number of records without the HEAD."""
    unsettled: int = 0
    """Number of its spans still with the exporter."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call whose END is in a segment."""

    segment: _Segment
    span_id: int
    unsettled: int
    """Number of its spans still with the exporter."""


@dataclass(slots=True)
class _Tally:
    """One attempt under one marker."""

    place: Place
    spans: int
    """Number of ended spans."""
    open: dict[int, _Segment | None] = field(default_factory=dict[int, "_Segment | None"])
    """{id of the first span of a call in flight: the segment of its START}."""
    segment: _Segment | None = None
    """The segment of the latest record; None after a write error."""
    closed: bool = False
    """Whether the last seal was acknowledged."""


class Journal:
    """An open journal. `known`, `start` and `end` are called from one thread, `settled` and `tidy` from others.

    Args:
        folder: used by this process only; created here.
        ledger: counts the same spans.
        head: resource and scope of all spans (`WholeSpans.head`).
        masker: masks spans before they are written; exported spans are masked by the collector.

    Raises UnavailableError if the folder cannot be used.
    """

    def __init__(self, folder: Path, ledger: Ledger, head: tuple[bytes, bytes], *, masker: Masker | None = None) -> None:
        self._folder = folder
        self._ledger = ledger
        self._parts = head
        self._head = packed([boot_id(), len(head[0])], b"".join(head))
        self._masker = masker
        self._lock = threading.RLock()
        self._tallies: dict[tuple[Key, str], _Tally] = {}
        self._segments: list[_Segment] = []
        self._number = 0
        self.trouble = ""
        """Why attempts served now count as incomplete; empty while all is well."""
        self._appended = False
        self._stop = threading.Event()
        try:
            folder.mkdir(parents=True, mode=0o700)
            self._claim = FileLock.take(folder / LOCK)
            (folder / WHOLE).touch(0o600)
            self._segments.append(self._new_segment())
        except OSError as error:
            raise UnavailableError(f"the proxy's journal cannot be kept in {folder}: {error.strerror or error}") from None
        self._tidier = threading.Thread(target=self._tidy_on, name="agl-otel-journal", daemon=True)
        self._tidier.start()

    def known(self, span: Begun) -> None:
        """Record that this process serves an attempt: recovery then seals it even if no call was forwarded."""
        if span.key is None:
            return
        with self._lock:
            if (span.key, span.marker) not in self._tallies:
                self._write(COUNT, span.key, span.marker, self._tally(span.key, span), 0)

    def start(self, span: Begun) -> None:
        """Record that a call is about to be forwarded."""
        if span.key is None:
            return
        with self._lock:
            tally, span_id = self._tally(span.key, span), span.context.span_id
            tally.closed = False
            tally.open[span_id] = None
            tally.open[span_id] = self._write(START, span.key, span.marker, tally, span_id)

    def end(self, span: Begun, ended: Sequence[WholeSpan]) -> None:
        """Record the spans of an ended call; a further record of the same call replaces the earlier one."""
        if span.key is None:
            return
        data = b"".join([each.wire_bytes() for each in ended])
        if self._masker is not None:
            data = self._masked(self._masker, data)
        with self._lock:
            tally, span_id = self._tally(span.key, span), span.context.span_id
            if span_id in tally.open:
                del tally.open[span_id]
                tally.spans += len(ended)
            segment = self._write(END, span.key, span.marker, tally, span_id, data)
            call = _Call(segment, span_id, len(ended)) if segment is not None else None
            for each in ended:
                each.place = call
            if segment is not None:
                segment.unsettled += len(ended)

    def closed(self, keys: Collection[Key]) -> None:
        """Record that these attempts are closed and that all their spans of this process were acknowledged."""
        with self._lock:
            for key in keys:
                count = self._ledger.count(key)
                tally = self._tallies.get((key, count.marker)) if count is not None else None
                if count is not None and tally is not None and not tally.open:
                    tally.closed = True
                    self._write(CLOSED, key, count.marker, tally, 0)

    def settled(self, spans: Sequence[ReadableSpan]) -> None:
        """Record that the exporter acknowledged or gave up these spans: recovery does not send them again."""
        calls: list[int] = []
        with self._lock:
            for span in spans:
                if isinstance(span, WholeSpan) and isinstance(call := span.place, _Call):
                    call.segment.unsettled -= 1
                    call.unsettled -= 1
                    span.place = None
                    if not call.unsettled:
                        calls.append(call.span_id)
            if calls:
                with contextlib.suppress(OSError):  # then they are sent again, and deduplicated on read
                    self._segments[-1].file.write([(SETTLED, packed([""], b"".join(call.to_bytes(8) for call in calls)))])
                    self._segments[-1].records += 1

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Delete these rollouts from the files. Raises UnavailableError."""
        gone = set(rollout_ids)
        with self._lock:
            for name in [name for name in self._tallies if name[0][0] in gone]:
                del self._tallies[name]
            try:
                for segment in self._segments:
                    segment.file = _without(segment.file, gone)
            except OSError as error:
                raise UnavailableError(f"the proxy's journal in {self._folder} cannot be written: {error.strerror or error}") from None

    def close(self) -> None:
        """Close the journal; remove it if everything was acknowledged, last seals included."""
        self._stop.set()
        self._tidier.join()
        with self._lock:
            whole = all(segment.unsettled <= 0 for segment in self._segments) and not any(map(self._must_stay, self._tallies.items()))
            for segment in self._segments:
                segment.file.close()
            with contextlib.suppress(OSError):  # the next proxy recovers the rest
                if whole:
                    clear(self._folder)
            self._claim.close()

    def tidy(self) -> None:
        """Remove segments whose spans were all acknowledged. Raises OSError."""
        with self._lock:
            due = self._is_due()
            self._appended = False
        new = self._new_segment() if due else None  # outside the lock: it syncs the folder, and calls must not wait
        with self._lock:
            if new is not None:
                self._segments.append(new)
            while len(self._segments) > 1 and self._segments[0].unsettled <= 0:
                self._carry(self._segments[0])
                old = self._segments.pop(0)
                old.file.close()
                remove(old.file.path)
            if self.trouble and new is not None and self._segments == [new]:
                (self._folder / LOSSY).rename(self._folder / WHOLE)
                self.trouble = ""

    def _tidy_on(self) -> None:
        failed = False
        while not self._stop.wait(TIDY_SECONDS):
            try:
                self.tidy()
                failed = False
            except OSError as error:
                if failed:  # logged already
                    continue
                failed = True
                _logger.warning("the proxy's journal in %s cannot be cut now: %s", self._folder, error.strerror or error)

    def _is_due(self) -> bool:
        """Whether to begin a new segment: the last is large, or holds more records than must be kept."""
        last = self._segments[-1]
        if last.file.size >= SEGMENT_BYTES:
            return True
        if last.unsettled > 0 or self._appended:
            return False
        if self.trouble and len(self._segments) == 1:
            return True  # without the segment with gaps the journal is whole again
        return last.records > sum(1 for _ in self._carried(last))

    def _carried(self, segment: _Segment) -> Iterator[tuple[int, Key, str, _Tally, int]]:
        """The records to copy before `segment` is removed."""
        for name, tally in self._tallies.items():
            starts = [span_id for span_id, place in tally.open.items() if place in (segment, None)]
            for span_id in starts:
                yield START, *name, tally, span_id
            if not starts and tally.segment in (segment, None) and self._must_stay((name, tally)):
                yield COUNT, *name, tally, 0

    def _carry(self, segment: _Segment) -> None:
        for kind, key, marker, tally, span_id in list(self._carried(segment)):
            place = self._append(kind, key, marker, tally, span_id)  # raises on a write error: the segment is kept then
            if kind == START:
                tally.open[span_id] = place
        for name in [name for name, tally in self._tallies.items() if not tally.open and tally.segment in (segment, None)]:
            del self._tallies[name]

    def _must_stay(self, named: tuple[tuple[Key, str], _Tally]) -> bool:
        """Whether the attempt still needs a last seal of this process, without which it cannot be complete."""
        ((key, marker), tally) = named
        count = self._ledger.count(key)
        forgotten = count is None or count.marker != marker
        return bool(tally.open) or not (tally.closed or forgotten)

    def _tally(self, key: Key, span: Begun) -> _Tally:
        tally = self._tallies.get((key, span.marker))
        if tally is None:
            count = self._ledger.count(key)
            before = count.spans if count is not None and count.marker == span.marker else 0
            place = (span.context.trace_id, (span.parent or span.context).span_id)
            tally = self._tallies[key, span.marker] = _Tally(place, before)
        return tally

    def _write(self, kind: int, key: Key, marker: str, tally: _Tally, span_id: int, data: bytes = b"") -> _Segment | None:
        """Write a record; return its segment, or None after a write error."""
        try:
            segment = self._append(kind, key, marker, tally, span_id, data)
        except OSError as error:
            self._refused(key, marker, error)
            tally.segment = None
            return None
        self._appended |= kind in (START, END)
        return segment

    def _append(self, kind: int, key: Key, marker: str, tally: _Tally, span_id: int, data: bytes = b"") -> _Segment:
        """Write a record and return its segment. Raises OSError."""
        count = self._ledger.count(key)
        dropped = count.dropped if count is not None and count.marker == marker else 0
        head = [*key, marker, f"{tally.place[0]:032x}", f"{tally.place[1]:016x}", tally.spans, dropped, f"{span_id:016x}"]
        segment = self._segments[-1]
        segment.file.write([(kind, packed(head, data))])
        segment.records += 1
        tally.segment = segment
        return segment

    def _refused(self, key: Key, marker: str, error: OSError) -> None:
        self._ledger.dropped(key, marker)
        if self.trouble:
            return
        said = unwritable(f"the proxy's journal in {self._folder}", error)
        self.trouble = f"{said}. Until then calls are served, and their attempts count as incomplete"
        _logger.error("%s", self.trouble)
        try:
            (self._folder / WHOLE).rename(self._folder / LOSSY)
        except OSError as again:
            _logger.error("and it cannot be marked as lossy: %s", again.strerror or again)

    def _masked(self, masker: Masker, data: bytes) -> bytes:
        raw = of_parts(*self._parts, data)
        masked = masker.masked("traces", raw)
        if masked == raw:
            return data
        request = ExportTraceServiceRequest.FromString(masked)
        return b"".join([field_of(span.SerializeToString()) for span in request.resource_spans[0].scope_spans[0].spans])

    def _new_segment(self) -> _Segment:
        file = FramedFile(self._folder / f"{self._number + 1:012d}{SUFFIX}")
        try:
            file.write([(HEAD, self._head)])
        except OSError:
            file.discard()
            raise
        self._number += 1
        return _Segment(file)


def packed(head: Any, data: bytes = b"") -> bytes:
    """Encode the payload of a record."""
    text = to_json(head)
    return _SIZE.pack(len(text)) + text + data


def unpacked(payload: bytes) -> tuple[list[Any], bytes]:
    """Decode what `packed` encoded. Raises DataError."""
    try:
        (size,) = _SIZE.unpack_from(payload)
        head = json.loads(payload[_SIZE.size : _SIZE.size + size])
        if isinstance(head, list):
            return cast("list[Any]", head), payload[_SIZE.size + size :]
    except (ValueError, RecursionError, struct.error):
        pass
    raise DataError("a record of a proxy's journal cannot be read")


def boot_id() -> str:
    """The boot id of the machine; empty if the system has none."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def segments_of(folder: Path) -> list[Path]:
    """The files of a journal, in order."""
    return sorted(folder.glob(f"*{SUFFIX}"))


def _is_readable(frame: Frame) -> bool:
    try:
        return bool(unpacked(frame.payload)[0])
    except DataError:
        return False


def clear(folder: Path) -> None:
    """Remove a journal. Raises OSError."""
    for path in [*segments_of(folder), *folder.iterdir()]:
        path.unlink(missing_ok=True)
    folder.rmdir()


def without(path: Path, rollout_ids: Collection[str]) -> None:
    """Delete these rollouts from a segment that is not being written. Raises OSError."""
    file = FramedFile(path)
    try:
        file = _without(file, rollout_ids)
    finally:
        file.close()


def _without(file: FramedFile, rollout_ids: Collection[str]) -> FramedFile:
    """Return the file, or a replacement without these rollouts."""
    entries = read(file.path)
    frames = [entry for entry in entries if isinstance(entry, Frame) and _is_readable(entry)]
    if len(frames) < len(entries):  # damage may belong to these rollouts: it is not copied, and the journal marked
        with contextlib.suppress(FileNotFoundError):
            (file.path.parent / WHOLE).rename(file.path.parent / LOSSY)
    kept = [each for each in frames if each.kind == HEAD or unpacked(each.payload)[0][0] not in rollout_ids]
    if len(kept) == len(entries):
        return file
    new = FramedFile(file.path.with_name(f"{file.path.stem}a{SUFFIX}"))  # sorts after it and before the next one
    try:
        new.write([(each.kind, each.payload) for each in kept])
        new.sync()
        file.path.unlink()
    except OSError:
        new.discard()
        raise
    file.discard()
    return new
