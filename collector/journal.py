"""Contents of the write-ahead log's records, and the recovery state that a log leaves at a start.

    REQUEST  a request as received, with its time of receipt and the identity of each of its spans
    BATCH    written (and fsynced) before an insert: batch id, first and last position, the sequence numbers it uses
    STORED   the batch is in ClickHouse and on disk; only a hint: without it recovery asks ClickHouse
    SETTLED  which rows ClickHouse has of requests whose batches are unknown, because records were lost

Given the requests, a BATCH record reproduces the same rows bit for bit. A batch in doubt can therefore be compared with what is stored.
If a BATCH record or one of its requests is lost, the rows are looked up by their content (stored.py) before anything is inserted: a
SETTLED record notes which were found, and the missing ones go into a new batch.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal, NamedTuple

from agl_otel.collector.identities import Identities, Identity
from agl_otel.collector.wal import Record
from agl_otel.service.framed import Lost

REQUEST: Final = 1
BATCH: Final = 2
STORED: Final = 3
SETTLED: Final = 4
_NAMES: Final = {BATCH: "the note of a batch", STORED: "the note that a batch is stored", SETTLED: "what was found stored after damage"}
_ROWS: Final = {"traces": "spans", "logs": "log records", "metrics": "data points"}
_NAMED: Final = 5  # rollouts that the report of a lost request names
ALREADY: Final = "it is stored already"
"""The reason of identities that a SETTLED record names; not a rejection."""

Signal = Literal["traces", "logs", "metrics"]
_SIZE: Final = struct.Struct("<I")


class Request(NamedTuple):
    """An accepted request."""

    signal: Signal
    received_ms: int
    """Unix milliseconds of receipt; kept on replay."""
    identities: Identities
    """One per span, log record or data point in `raw`, including refused ones."""
    raw: bytes
    """The protobuf bytes, unchanged except for removed or masked parts."""
    key: int = 0
    """Identifies a resend of it (intake.py); 0: none."""
    unreadable: int = 0
    """Number of spans, records or points removed at receipt (unreadable.py)."""
    expanded: int = 0
    """Approximate size of its rows in bytes (expansion.py); 0: unknown."""

    @property
    def rows(self) -> int:
        """Number of rows that it becomes."""
        return self.identities.taken


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are inserted together."""

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
class RecoveryState:
    """Recovery state of a log at a start."""

    in_doubt: list[tuple[Batch | None, list[Member]]] = field(default_factory=list[tuple[Batch | None, list[Member]]])
    """Batches that may or may not be stored, with their requests that are still in the log, in log order. Without a Batch: requests that a
    batch may have taken whose record was lost."""
    unwritten: list[Member] = field(default_factory=list[Member])
    """Acknowledged requests that no batch took; they come after all that is in doubt."""
    batch_id: int = 0
    """The highest batch id seen."""
    requests: list[tuple[int | None, Request]] = field(default_factory=list[tuple[int | None, Request]])
    """All requests in the log; the position is None if the request is known to be stored."""


def pack_request(request: Request) -> bytes:
    """Build the payload of a REQUEST record; ids are run-length encoded, because most requests hold one attempt or a few."""
    table: dict[tuple[str, str, str], int] = {}
    runs: list[tuple[int, int]] = []
    explicit: list[tuple[int, int]] = []
    for count, (rollout_id, attempt_id, sequence, reason) in request.identities.runs:
        runs.append((table.setdefault((rollout_id, attempt_id, reason), len(table)), count))
        if sequence is not None:
            explicit.append((len(runs) - 1, sequence))
    about = [request.signal, request.received_ms, request.key, request.unreadable, list(table), runs, explicit, request.expanded]
    head = json.dumps(about, separators=(",", ":")).encode()
    return b"".join((_SIZE.pack(len(head)), head, request.raw))


def unpack_request(payload: bytes) -> Request:
    """Parse the payload of a REQUEST record."""
    (size,) = _SIZE.unpack_from(payload)
    start = _SIZE.size + size
    signal, received_ms, key, unreadable, table, runs, explicit, *more = json.loads(payload[_SIZE.size : start])
    explicit = dict(explicit)
    ids = (Identity(table[ids][0], table[ids][1], explicit.get(number), table[ids][2]) for number, (ids, _) in enumerate(runs))
    identities = Identities(zip((count for _, count in runs), ids, strict=True))
    return Request(signal, received_ms, identities, payload[start:], key, unreadable, *more)


def pack_batch(batch: Batch) -> bytes:
    """Build the payload of a BATCH record."""
    return json.dumps([batch.batch_id, batch.first, batch.last, batch.numbers], separators=(",", ":")).encode()


def unpack_batch(payload: bytes) -> Batch:
    """Parse the payload of a BATCH record."""
    batch_id, first, last, numbers = json.loads(payload)
    return Batch(batch_id, first, last, numbers)


def pack_stored(batch: Batch) -> bytes:
    """Build the payload of a STORED record."""
    return str(batch.batch_id).encode()


def pack_settled(found: Mapping[int, Sequence[int]]) -> bytes:
    """Build the payload of a SETTLED record: {log position of a request: its stored identities, by index}."""
    return json.dumps(list(found.items()), separators=(",", ":")).encode()


def without_stored(request: Request, found: Collection[int]) -> Request:
    """Return the request with the identities at these indexes marked as stored."""
    if not found:
        return request
    stored = set(found)
    each = (i._replace(reason=i.reason or ALREADY) if index in stored else i for index, i in enumerate(request.identities))
    return request._replace(identities=Identities.of(each))


def describe(kind: int | None, payload: bytes) -> str:
    """Describe a lost record, as far as its payload is readable."""
    if kind in _NAMES:
        return _NAMES[kind]
    try:
        request = unpack_request(payload)
        rows = f"{request.rows} {_ROWS[request.signal]}"
    except (ValueError, TypeError, LookupError, struct.error):  # it is damaged
        return "a request" if kind == REQUEST else ""
    of = sorted({each.rollout_id for _, each in request.identities.runs if not each.reason})
    more = f" and {len(of) - _NAMED} more" if len(of) > _NAMED else ""
    return f"{rows} of {', '.join(map(repr, of[:_NAMED]))}{more}"


def recovery_state(records: Iterable[Record | Lost]) -> RecoveryState:
    """Read a log at a start.

    A batch of which some requests are gone is stored: a segment is deleted only after every batch that it feeds.
    """
    found = _Found.of(records)
    stored: set[int] = set()
    doubt: dict[int, Batch | None] = {}
    for noted_at, batch in found.batches:
        members = [position for position in found.requests if batch.first <= position <= batch.last]
        if batch.batch_id in found.stored or batch.first < found.first:
            stored.update(members)
        elif all(found.settled.get(position, -1) < noted_at for position in members):  # otherwise the rest was settled since
            doubt.update(dict.fromkeys(members, batch if found.can_rebuild(noted_at, batch, members) else None))
    asked = (position for position in found.requests if position not in stored and (position in doubt or found.may_be_taken(position)))
    last = max(asked, default=-1)
    result = RecoveryState(batch_id=max((batch.batch_id for _, batch in found.batches), default=0))
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
    """The contents of a log."""

    first: int = 0
    """Position of its first record."""
    requests: dict[int, Request] = field(default_factory=dict[int, Request])
    batches: list[tuple[int, Batch]] = field(default_factory=list[tuple[int, Batch]])
    """Each with the position of its record."""
    stored: set[int] = field(default_factory=set[int])
    """Ids of stored batches."""
    settled: dict[int, int] = field(default_factory=dict[int, int])
    """{position of a request: position of the last record that settled it}."""
    already: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """{position of a request: its stored identities, by index}, from the last such record."""
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
        """Return the request without its stored rows."""
        return without_stored(self.requests[position], self.already.get(position, ()))

    def may_be_taken(self, position: int) -> bool:
        """Return whether a lost record may be the BATCH record of this request."""
        since = max(position, self.settled.get(position, -1))
        return any(lost.last > since for lost in self.lost if lost.kind not in (REQUEST, STORED))

    def can_rebuild(self, noted_at: int, batch: Batch, members: Sequence[int]) -> bool:
        """Return whether its rows can be reproduced: none of its requests is lost, nor a record of which rows were left of one."""
        for lost in self.lost:
            if lost.kind not in (BATCH, STORED, SETTLED) and lost.first <= batch.last and batch.first <= lost.last:
                return False
            if lost.kind not in (REQUEST, BATCH, STORED) and any(
                max(position, self.settled.get(position, -1)) < lost.last < noted_at for position in members
            ):
                return False
        return True


def number_requests(requests: Iterable[Request]) -> list[tuple[str, int, int]]:
    """Build the request to the queue for a batch: (rollout id, how many numbers, the highest explicit number or 0), spans only."""
    counts: dict[str, tuple[int, int]] = {}
    for request in requests:
        if request.signal == "traces":
            for items, (rollout_id, _, sequence, reason) in request.identities.runs:
                if rollout_id and not reason:
                    count, highest = counts.get(rollout_id, (0, 0))
                    counts[rollout_id] = (count + (items if sequence is None else 0), max(highest, sequence or 0))
    return [(rollout_id, count, highest) for rollout_id, (count, highest) in counts.items()]


def assign(identities: Identities, following: dict[str, int]) -> list[int]:
    """Return the sequence number of each accepted span, in order; `following` holds each rollout's next number and is advanced."""
    numbers: list[int] = []
    for count, (rollout_id, _, sequence, reason) in identities.runs:
        if reason:
            continue
        if sequence is not None or not rollout_id:
            numbers += [sequence or 0] * count
        else:
            first = following[rollout_id]
            numbers += range(first, first + count)
            following[rollout_id] += count
    return numbers
