"""What the records of the write-ahead log mean, and what a log that was left behind asks for.

    REQUEST  a request as it came, with its time of receipt and what identification said of each of its spans
    BATCH    written (and fsynced) before an insert: batch id, first and last position, the sequence numbers it uses
    STORED   the batch is in ClickHouse and on disk; a hint only: without it recovery asks ClickHouse
    SETTLED  what ClickHouse has of requests whose batches nobody knows any more, because records were lost

Given the requests, a BATCH record makes the same rows again, bit for bit. So a batch in doubt can be compared with what is stored. Where
a BATCH record is lost, or a request that one took, its rows are looked up by what they are (stored.py) before anything is inserted: a
SETTLED record notes what was found, what is missing then goes into a batch of its own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, Literal

from agl_otel.collector.identify import Identity
from agl_otel.collector.wal import Record
from agl_otel.service.framed import Lost

REQUEST: Final = 1
BATCH: Final = 2
STORED: Final = 3
SETTLED: Final = 4
_NAMES: Final = {BATCH: "the note of a batch", STORED: "the note that a batch is stored", SETTLED: "what was found stored after damage"}
_ROWS: Final = {"traces": "spans", "logs": "log records", "metrics": "data points"}
_NAMED: Final = 5  # rollouts of a request that is lost
ALREADY: Final = "it is stored already"
"""The reason of what a SETTLED record names; no rejection."""

Signal = Literal["traces", "logs", "metrics"]
_SIZE: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Request:
    """An accepted request."""

    signal: Signal
    received_ms: int
    """Unix milliseconds of receipt; kept on replay."""
    identities: list[Identity]
    """One for each span, log record or data point in `raw`, refused ones included."""
    raw: bytes
    """The protobuf bytes, untouched but for what was taken out."""
    key: str = ""
    """What tells a resend of it (intake.py)."""
    unreadable: int = 0
    """How many spans, records or points were taken out at receipt (unreadable.py)."""
    expanded: int = 0
    """How large its rows are, about, in bytes (expansion.py); 0: not known."""

    @property
    def rows(self) -> int:
        """How many rows it becomes."""
        return sum(not identity.reason for identity in self.identities)


@dataclass(frozen=True, slots=True)
class Batch:
    """What is inserted together."""

    batch_id: int
    first: int
    """Log position of its first request."""
    last: int
    """Log position of its last request, inclusive."""
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    """{rollout id: the first sequence number that this batch took}."""


Member = tuple[int, Request]
"""(log position, request)."""


@dataclass
class Leftover:
    """What a log asks for after a start."""

    in_doubt: list[tuple[Batch | None, list[Member]]] = field(default_factory=list[tuple[Batch | None, list[Member]]])
    """Batches that may or may not be stored, with the requests that still stand in the log, in its order. Without a Batch: requests that
    a batch may have taken whose record was lost."""
    unwritten: list[Member] = field(default_factory=list[Member])
    """Acknowledged requests that no batch took; they come after all that is in doubt."""
    batch_id: int = 0
    """The highest batch id seen."""
    requests: list[tuple[int | None, Request]] = field(default_factory=list[tuple[int | None, Request]])
    """All that the log holds; the position is None where it is known to be stored."""


def pack_request(request: Request) -> bytes:
    """The payload of a REQUEST record: ids in runs, because most requests hold one attempt or a few."""
    table: dict[tuple[str, str, str], int] = {}
    runs: list[tuple[int, int]] = []
    for ids, run in groupby((i.rollout_id, i.attempt_id, i.reason) for i in request.identities):
        runs.append((table.setdefault(ids, len(table)), sum(1 for _ in run)))
    explicit = [(index, i.sequence) for index, i in enumerate(request.identities) if i.sequence is not None]
    about = [request.signal, request.received_ms, request.key, request.unreadable, list(table), runs, explicit, request.expanded]
    head = json.dumps(about, separators=(",", ":")).encode()
    return b"".join((_SIZE.pack(len(head)), head, request.raw))


def unpack_request(payload: bytes) -> Request:
    """The inverse of pack_request."""
    (size,) = _SIZE.unpack_from(payload)
    start = _SIZE.size + size
    signal, received_ms, key, unreadable, table, runs, explicit, *more = json.loads(payload[_SIZE.size : start])
    identities = [Identity(table[n][0], table[n][1], None, table[n][2]) for n, count in runs for _ in range(count)]
    for index, sequence in explicit:
        identities[index] = identities[index]._replace(sequence=sequence)
    return Request(signal, received_ms, identities, payload[start:], key, unreadable, *more)


def pack_batch(batch: Batch) -> bytes:
    """The payload of a BATCH record."""
    return json.dumps([batch.batch_id, batch.first, batch.last, batch.numbers], separators=(",", ":")).encode()


def unpack_batch(payload: bytes) -> Batch:
    """The inverse of pack_batch."""
    batch_id, first, last, numbers = json.loads(payload)
    return Batch(batch_id, first, last, numbers)


def pack_stored(batch: Batch) -> bytes:
    """The payload of a STORED record."""
    return str(batch.batch_id).encode()


def pack_settled(found: Mapping[int, Sequence[int]]) -> bytes:
    """The payload of a SETTLED record: {log position of a request: which of its identities are stored}."""
    return json.dumps(list(found.items()), separators=(",", ":")).encode()


def without_stored(request: Request, found: Collection[int]) -> Request:
    """The request as what is left of it: the identities at these indexes are stored."""
    if not found:
        return request
    gone = set(found)
    identities = [i._replace(reason=i.reason or ALREADY) if index in gone else i for index, i in enumerate(request.identities)]
    return replace(request, identities=identities)


def describe(kind: int | None, payload: bytes) -> str:
    """What a record is that was lost, as far as its payload still tells."""
    if kind in _NAMES:
        return _NAMES[kind]
    try:
        request = unpack_request(payload)
        rows = f"{request.rows} {_ROWS[request.signal]}"
    except (ValueError, TypeError, LookupError, struct.error):  # it is damaged
        return "a request" if kind == REQUEST else ""
    of = sorted({each.rollout_id for each in request.identities if not each.reason})
    more = f" and {len(of) - _NAMED} more" if len(of) > _NAMED else ""
    return f"{rows} of {', '.join(map(repr, of[:_NAMED]))}{more}"


def leftover(records: Iterable[Record | Lost]) -> Leftover:
    """Read a log that was left behind.

    A batch whose requests are partly gone is stored: a segment is deleted only after every batch that it feeds.
    """
    found = _Found.of(records)
    stored: set[int] = set()
    doubt: dict[int, Batch | None] = {}
    for noted_at, batch in found.batches:
        members = [position for position in found.requests if batch.first <= position <= batch.last]
        if batch.batch_id in found.stored or batch.first < found.first:
            stored.update(members)
        elif all(found.settled.get(position, -1) < noted_at for position in members):  # else what it left was found out since
            doubt.update(dict.fromkeys(members, batch if found.can_rebuild(noted_at, batch, members) else None))
    asked = (position for position in found.requests if position not in stored and (position in doubt or found.may_be_taken(position)))
    last = max(asked, default=-1)
    result = Leftover(batch_id=max((batch.batch_id for _, batch in found.batches), default=0))
    for (done, batch), run in groupby(found.requests, key=lambda position: (position in stored or position > last, doubt.get(position))):
        members = [(position, found.left(position)) for position in run]
        if batch is None:
            members = [member for member in members if member[1].rows]
        if members and not done:
            result.in_doubt.append((batch, members))
    unwritten = ((position, found.left(position)) for position in found.requests if position > last and position not in stored)
    result.unwritten = [member for member in unwritten if member[1].rows]
    result.requests = [(None if position in stored else position, request) for position, request in found.requests.items()]
    return result


@dataclass
class _Found:
    """What stands in a log."""

    first: int = 0
    """The position at which it begins."""
    requests: dict[int, Request] = field(default_factory=dict[int, Request])
    batches: list[tuple[int, Batch]] = field(default_factory=list[tuple[int, Batch]])
    """With the position of the record."""
    stored: set[int] = field(default_factory=set[int])
    """Ids of batches."""
    settled: dict[int, int] = field(default_factory=dict[int, int])
    """{position of a request: the position of the last record that settled it}."""
    already: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """{position of a request: which of its identities are stored}, as the last such record says."""
    lost: list[Lost] = field(default_factory=list[Lost])

    @classmethod
    def of(cls, records: Iterable[Record | Lost]) -> _Found:
        found = cls()
        for number, record in enumerate(records):
            if number == 0:
                found.first = record.first if isinstance(record, Lost) else record.position
            if isinstance(record, Lost):
                found.lost.append(record)
            elif record.kind == REQUEST:
                found.requests[record.position] = unpack_request(record.payload)
            elif record.kind == BATCH:
                found.batches.append((record.position, unpack_batch(record.payload)))
            elif record.kind == STORED:
                found.stored.add(int(record.payload))
            elif record.kind == SETTLED:
                found.already.update(json.loads(record.payload))
                found.settled.update(dict.fromkeys((position for position, _ in json.loads(record.payload)), record.position))
        return found

    def left(self, position: int) -> Request:
        """What is left to be stored of a request."""
        return without_stored(self.requests[position], self.already.get(position, ()))

    def may_be_taken(self, position: int) -> bool:
        """Whether a lost record may be that of a batch which took this request."""
        since = max(position, self.settled.get(position, -1))
        return any(lost.last > since for lost in self.lost if lost.kind not in (REQUEST, STORED))

    def can_rebuild(self, noted_at: int, batch: Batch, members: Sequence[int]) -> bool:
        """Whether its rows can be made again as they were: no request of it is lost, nor what was left of one."""
        for lost in self.lost:
            if lost.kind not in (BATCH, STORED, SETTLED) and lost.first <= batch.last and batch.first <= lost.last:
                return False
            if lost.kind not in (REQUEST, BATCH, STORED) and any(
                max(position, self.settled.get(position, -1)) < lost.last < noted_at for position in members
            ):
                return False
        return True


def number_requests(requests: Iterable[Request]) -> list[tuple[str, int, int]]:
    """What to ask of the queue for a batch: (rollout id, how many numbers, the highest explicit number or 0), spans only."""
    wanted: dict[str, tuple[int, int]] = {}
    for request in requests:
        if request.signal == "traces":
            for rollout_id, _, sequence, reason in request.identities:
                if rollout_id and not reason:
                    count, highest = wanted.get(rollout_id, (0, 0))
                    wanted[rollout_id] = (count + (sequence is None), max(highest, sequence or 0))
    return [(rollout_id, count, highest) for rollout_id, (count, highest) in wanted.items()]


def assign(identities: Iterable[Identity], following: dict[str, int]) -> list[int]:
    """The sequence number of each taken span, in order; `following` holds each rollout's next number and is moved on."""
    numbers: list[int] = []
    for rollout_id, _, sequence, reason in identities:
        if reason:
            continue
        if sequence is not None or not rollout_id:
            numbers.append(sequence or 0)
        else:
            numbers.append(following[rollout_id])
            following[rollout_id] += 1
    return numbers
