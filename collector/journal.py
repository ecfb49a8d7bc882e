"""What the records of the write-ahead log mean, and what a log that was left behind asks for.

    REQUEST  a request as it came, with its time of receipt and what identification said of each of its spans
    BATCH    written (and fsynced) before an insert: batch id, first and last position, the sequence numbers it uses
    STORED   the batch is in ClickHouse and on disk; a hint only: without it recovery asks ClickHouse

Given the requests, a BATCH record makes the same rows again, bit for bit. So a batch in doubt can be compared with what is stored.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal

from agl_otel.collector.identify import Identity
from agl_otel.collector.wal import Record

REQUEST: Final = 1
BATCH: Final = 2
STORED: Final = 3

Signal = Literal["traces", "logs", "metrics"]
_SIZE: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Request:
    """An accepted request."""

    signal: Signal
    received_ms: int
    """Unix milliseconds of receipt; kept on replay."""
    identities: list[Identity]
    """One for each span or log record of the request, refused ones included."""
    raw: bytes
    """The protobuf bytes, untouched."""
    key: str = ""
    """What tells a resend of it (intake.py)."""

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


@dataclass
class Leftover:
    """What a log asks for after a start."""

    in_doubt: list[tuple[Batch, list[tuple[int, Request]]]] = field(default_factory=list[tuple[Batch, list[tuple[int, Request]]]])
    """Batches that may or may not be stored, with the requests (position, request) that still stand in the log."""
    unwritten: list[tuple[int, Request]] = field(default_factory=list[tuple[int, Request]])
    """Acknowledged requests that no batch took."""
    batch_id: int = 0
    """The highest batch id seen."""


def pack_request(request: Request) -> bytes:
    """The payload of a REQUEST record: ids in runs, because most requests hold one attempt or a few."""
    table: dict[tuple[str, str, str], int] = {}
    runs: list[tuple[int, int]] = []
    for ids, run in groupby((i.rollout_id, i.attempt_id, i.reason) for i in request.identities):
        runs.append((table.setdefault(ids, len(table)), sum(1 for _ in run)))
    explicit = [(index, i.sequence) for index, i in enumerate(request.identities) if i.sequence is not None]
    head = json.dumps([request.signal, request.received_ms, request.key, list(table), runs, explicit], separators=(",", ":")).encode()
    return b"".join((_SIZE.pack(len(head)), head, request.raw))


def unpack_request(payload: bytes) -> Request:
    """The inverse of pack_request."""
    (size,) = _SIZE.unpack_from(payload)
    start = _SIZE.size + size
    signal, received_ms, key, table, runs, explicit = json.loads(payload[_SIZE.size : start])
    identities = [Identity(table[n][0], table[n][1], None, table[n][2]) for n, count in runs for _ in range(count)]
    for index, sequence in explicit:
        identities[index] = identities[index]._replace(sequence=sequence)
    return Request(signal, received_ms, identities, payload[start:], key)


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


def leftover(records: Iterable[Record]) -> Leftover:
    """Read a log that was left behind.

    A batch whose requests are partly gone is stored: a segment is deleted only after every batch that it feeds.
    """
    requests: dict[int, Request] = {}
    batches: list[Batch] = []
    stored: set[int] = set()
    first_position: int | None = None
    for record in records:
        first_position = record.position if first_position is None else first_position
        if record.kind == REQUEST:
            requests[record.position] = unpack_request(record.payload)
        elif record.kind == BATCH:
            batches.append(unpack_batch(record.payload))
        elif record.kind == STORED:
            stored.add(int(record.payload))
    result = Leftover(batch_id=max((batch.batch_id for batch in batches), default=0))
    taken: set[int] = set()
    for batch in batches:
        members = [(position, requests[position]) for position in sorted(requests) if batch.first <= position <= batch.last]
        taken.update(position for position, _ in members)
        if batch.batch_id not in stored and members and batch.first >= (first_position or 0):
            result.in_doubt.append((batch, members))
    result.unwritten = [(position, requests[position]) for position in sorted(requests) if position not in taken]
    return result


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
