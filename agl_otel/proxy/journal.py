"""The proxy's journal: every call of an attempt, on disk before the agent can know of it, so that a killed proxy loses none unnoticed.

A START record is written before a request goes upstream, an END record, with the call's spans as they are exported, before the last byte
of its answer leaves. Neither is synced: both survive the end of the process, not that of the machine. What the collector has acknowledged
is cut: the files are segments (framed.py), and one all of whose spans were acknowledged is removed once another was begun; what must
outlive it (calls under way, counts of attempts that are not over) is written into that one first.

A record's payload is `size u32 | head (JSON) | data`. HEAD: [boot id, size of the resource], then resource and scope (wire.py). START, END,
COUNT and CLOSED (all of it is stored, and the attempt is over): [rollout, attempt, marker, trace id, parent's span id, spans ended so far,
dropped, the call's span id], then END's spans. SETTLED (the exporter has done with them): [no rollout], then span ids of calls.

A disk that is full, or refuses for another reason, stops no call. Its attempt counts as one of which something was dropped, and the file
`whole` is renamed to `lossy`, for which a full disk has room: whoever reads the journal later (inheritance.py) knows that it has gaps.
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
"""Below the data directory: a folder for each proxy process that runs, or died and left something."""
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
    """Without the HEAD."""
    unsettled: int = 0
    """Spans in it that the exporter still has."""


@dataclass(slots=True, eq=False)
class _Call:
    """Whose END a segment has."""

    segment: _Segment
    span_id: int
    unsettled: int
    """Its spans that the exporter still has."""


@dataclass(slots=True)
class _Tally:
    """One attempt under one marker."""

    place: Place
    spans: int
    """How many have ended."""
    open: dict[int, _Segment | None] = field(default_factory=dict[int, "_Segment | None"])
    """Calls under way, by the id of their first span: where their START is."""
    segment: _Segment | None = None
    """Where the latest record is; None where the disk refused it."""
    closed: bool = False
    """Whether the last seal was acknowledged."""


class Journal:
    """An open journal. `known`, `start` and `end` are called by one thread, `settled` and `tidy` by others.

    Args:
        folder: of this process alone; made here.
        ledger: counts the same spans.
        head: resource and scope of all spans (`WholeSpans.head`).
        masker: what is done to spans before they are written; the collector does it to those that are exported.

    Raises UnavailableError where the folder cannot be used.
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
        """Why attempts that are served now count as incomplete; empty where they do not."""
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
        """This process works for an attempt: whoever inherits the journal seals for it, though no call may ever be forwarded."""
        if span.key is None:
            return
        with self._lock:
            if (span.key, span.marker) not in self._tallies:
                self._write(COUNT, span.key, span.marker, self._tally(span.key, span), 0)

    def start(self, span: Begun) -> None:
        """A call is about to be forwarded."""
        if span.key is None:
            return
        with self._lock:
            tally, span_id = self._tally(span.key, span), span.context.span_id
            tally.closed = False
            tally.open[span_id] = None
            tally.open[span_id] = self._write(START, span.key, span.marker, tally, span_id)

    def end(self, span: Begun, ended: Sequence[WholeSpan]) -> None:
        """A call has ended with these spans. Said again, they stand in the place of the earlier ones."""
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
        """These attempts are over, and all that this process did for them was acknowledged."""
        with self._lock:
            for key in keys:
                count = self._ledger.count(key)
                tally = self._tallies.get((key, count.marker)) if count is not None else None
                if count is not None and tally is not None and not tally.open:
                    tally.closed = True
                    self._write(CLOSED, key, count.marker, tally, 0)

    def settled(self, spans: Sequence[ReadableSpan]) -> None:
        """The exporter has done with these: they were acknowledged, or given up. Who inherits the journal need not send them again."""
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
                with contextlib.suppress(OSError):  # then they are sent again, and a reader takes each once
                    self._segments[-1].file.write([(SETTLED, packed([""], b"".join(call.to_bytes(8) for call in calls)))])
                    self._segments[-1].records += 1

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Leave nothing of these rollouts in the files. Raises UnavailableError."""
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
        """Stop. Where all was acknowledged, last seals too, nothing is left."""
        self._stop.set()
        self._tidier.join()
        with self._lock:
            whole = all(segment.unsettled <= 0 for segment in self._segments) and not any(map(self._must_stay, self._tallies.items()))
            for segment in self._segments:
                segment.file.close()
            with contextlib.suppress(OSError):  # the next proxy finds what is there
                if whole:
                    clear(self._folder)
            self._claim.close()

    def tidy(self) -> None:
        """Remove what was acknowledged. Raises OSError."""
        with self._lock:
            due = self._is_due()
            self._appended = False
        new = self._new_segment() if due else None  # its name is synced: calls do not wait for that
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
                if failed:  # it was said
                    continue
                failed = True
                _logger.warning("the proxy's journal in %s cannot be cut now: %s", self._folder, error.strerror or error)

    def _is_due(self) -> bool:
        """Whether to go on in a new segment: this one is large, or of all that is in it less must stay."""
        last = self._segments[-1]
        if last.file.size >= SEGMENT_BYTES:
            return True
        if last.unsettled > 0 or self._appended:
            return False
        if self.trouble and len(self._segments) == 1:
            return True  # without the one in which something is missing the journal is whole again
        return last.records > sum(1 for _ in self._carried(last))

    def _carried(self, segment: _Segment) -> Iterator[tuple[int, Key, str, _Tally, int]]:
        """What must be written again before `segment` goes."""
        for name, tally in self._tallies.items():
            starts = [span_id for span_id, place in tally.open.items() if place in (segment, None)]
            for span_id in starts:
                yield START, *name, tally, span_id
            if not starts and tally.segment in (segment, None) and self._must_stay((name, tally)):
                yield COUNT, *name, tally, 0

    def _carry(self, segment: _Segment) -> None:
        for kind, key, marker, tally, span_id in list(self._carried(segment)):
            place = self._append(kind, key, marker, tally, span_id)  # where the disk refuses, it stays where it is
            if kind == START:
                tally.open[span_id] = place
        for name in [name for name, tally in self._tallies.items() if not tally.open and tally.segment in (segment, None)]:
            del self._tallies[name]

    def _must_stay(self, named: tuple[tuple[Key, str], _Tally]) -> bool:
        """Whether the attempt is not over: without its last seal nobody could rely on what this process did for it."""
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
        """Write a record; the segment that has it, None where the disk refuses."""
        try:
            segment = self._append(kind, key, marker, tally, span_id, data)
        except OSError as error:
            self._refused(key, marker, error)
            tally.segment = None
            return None
        self._appended |= kind in (START, END)
        return segment

    def _append(self, kind: int, key: Key, marker: str, tally: _Tally, span_id: int, data: bytes = b"") -> _Segment:
        """The same; raises OSError where the disk refuses."""
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
    """The payload of a record."""
    text = to_json(head)
    return _SIZE.pack(len(text)) + text + data


def unpacked(payload: bytes) -> tuple[list[Any], bytes]:
    """The inverse of `packed`. Raises DataError."""
    try:
        (size,) = _SIZE.unpack_from(payload)
        head = json.loads(payload[_SIZE.size : _SIZE.size + size])
        if isinstance(head, list):
            return cast("list[Any]", head), payload[_SIZE.size + size :]
    except (ValueError, RecursionError, struct.error):
        pass
    raise DataError("a record of a proxy's journal cannot be read")


def boot_id() -> str:
    """Which start of the machine this is; empty where the system does not tell."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""


def segments_of(folder: Path) -> list[Path]:
    """The files of a journal, in their order."""
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
    """Leave nothing of these rollouts in a segment that nobody writes. Raises OSError."""
    file = FramedFile(path)
    try:
        file = _without(file, rollout_ids)
    finally:
        file.close()


def _without(file: FramedFile, rollout_ids: Collection[str]) -> FramedFile:
    """The file itself, or another in its place that holds nothing of these rollouts."""
    entries = read(file.path)
    frames = [entry for entry in entries if isinstance(entry, Frame) and _is_readable(entry)]
    if len(frames) < len(entries):  # damage, which may be of these, is not copied: whoever reads the rest must know of it
        with contextlib.suppress(FileNotFoundError):
            (file.path.parent / WHOLE).rename(file.path.parent / LOSSY)
    kept = [each for each in frames if each.kind == HEAD or unpacked(each.payload)[0][0] not in rollout_ids]
    if len(kept) == len(entries):
        return file
    new = FramedFile(file.path.with_name(f"{file.path.stem}a{SUFFIX}"))  # sorted behind it, and before the next one
    try:
        new.write([(each.kind, each.payload) for each in kept])
        new.sync()
        file.path.unlink()
    except OSError:
        new.discard()
        raise
    file.discard()
    return new
