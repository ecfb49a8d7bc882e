"""Inserts one batch into ClickHouse exactly once: ask what is stored under its id, insert what is missing. Runs in the writer's thread.

A batch is rebuilt from its requests alone, so that its rows are the same before and after a crash. Only errors about the data make it split
the batch in half, until the request that causes them is alone and becomes a dead letter with the reason. The caller retries after any other
error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from agl_otel.collector import dead_letters, faults
from agl_otel.collector.decode import LOG_COLUMNS, TRACE_COLUMNS, log_rows, span_rows
from agl_otel.collector.dedup_tokens import DedupTokens
from agl_otel.collector.expansion import size_of
from agl_otel.collector.journal import Batch, Member, Request, assign
from agl_otel.collector.metrics import COLUMNS as METRIC_COLUMNS
from agl_otel.collector.metrics import TABLES as METRIC_TABLES
from agl_otel.collector.metrics import kinds_of, metric_rows
from agl_otel.collector.raw import Packed, pack
from agl_otel.collector.stored import find_stored
from agl_otel.collector.values import REPEATED
from agl_otel.traces.engine import DATABASE, ClickHouseError, Engine
from agl_otel.traces.schema import OTLP_ROWS
from agl_otel.traces.sql import OTLP_ROWS_SCHEMA, REFILLS, named_query

TABLES: Final = {
    "traces": (f"{DATABASE}.otel_traces", TRACE_COLUMNS),
    "logs": (f"{DATABASE}.otel_logs", LOG_COLUMNS),
    **{kind: (table, METRIC_COLUMNS[kind]) for kind, table in METRIC_TABLES.items()},
}
"""{kind of row: (table, columns)}."""
FAST_FROM_SPANS: Final = 400  # ClickHouse analyses the view at each insert: with fewer spans that costs more than it saves
FAST_FROM_BYTES: Final = 8 << 20  # size of the rows (expansion.py) from which a few spans, too, cost more to build here
FAST: Final = "fast"
"""The part of a batch that ClickHouse builds, in deduplication tokens; other parts are named by row kind and log positions."""
STORED: Final = (
    "BatchId = {batch:UInt64} AND ReceivedAt BETWEEN fromUnixTimestamp64Milli({first:Int64}) AND fromUnixTimestamp64Milli({last:Int64})"
)
"""The rows of a batch. The range of ReceivedAt lets ClickHouse skip other parts by their metadata, without opening them."""
PIECE_BYTES: Final = 8 << 20  # of rows, when a start has died on the batch
T = TypeVar("T")
_logger = logging.getLogger(__name__)


class _Rows(NamedTuple):
    member: Member
    positions: Sequence[int]  # BatchPos of each row
    rows: list[str]


class _Spans(NamedTuple):
    """Places of one request's spans in the batch."""

    numbers: list[int]  # sequence number of each taken span
    first: int  # BatchPos of the first

    @property
    def positions(self) -> range:
        return range(self.first, self.first + len(self.numbers))


def _pieces(request: Request, spans: _Spans) -> list[range]:
    """Split the positions of a request's spans into ranges whose rows take about PIECE_BYTES."""
    each = max(1, len(request.identities) * PIECE_BYTES // size_of(request))
    return [spans.positions[start : start + each] for start in range(0, len(spans.positions), each)]


def _rows_by_kind(request: Request) -> Mapping[str, int]:
    """Count the rows of each kind that a request produces, except spans, which _place places."""
    if request.signal == "metrics":
        kinds = kinds_of(ExportMetricsServiceRequest.FromString(request.raw))
        return Counter(kind for kind, identity in zip(kinds, request.identities, strict=True) if kind is not None and not identity.reason)
    return {request.signal: request.rows}


def _received(members: Sequence[Member]) -> dict[str, object]:
    """Return the parameters of STORED that hold for every table."""
    received = [request.received_ms for _, request in members]
    return {"first": min(received), "last": max(received)}


def _place(batch: Batch, members: Sequence[Member]) -> dict[int, _Spans]:
    """Return {log position: places of its spans} of the trace requests. A request that cannot be decoded keeps its places."""
    following = dict(batch.numbers)
    placed: dict[int, _Spans] = {}
    first = 0
    for position, request in members:
        if request.signal == "traces":
            placed[position] = _Spans(assign(request.identities, following), first)
            first = placed[position].positions.stop
    return placed


def _pack(batch: Batch, members: Sequence[Member], spans: Mapping[int, _Spans], stored: frozenset[int]) -> Packed:
    """Pack the spans of all requests whose rows ClickHouse can build; positions in `stored` are left out."""
    parts: list[bytes] = []
    left: set[int] = set()
    keys = repeated = 0
    for position, request in members:
        if (mine := spans.get(position)) is None:
            continue
        where = {"received_ms": request.received_ms, "batch": batch.batch_id, "first": mine.first}
        try:
            packed = pack(request.raw, request.identities, mine.numbers, **where, stored=stored)
        except Exception:  # noqa: BLE001 - the boundary: decode.py, which supports everything, reports what is wrong with the request
            left.update(mine.positions)
        else:
            parts.append(packed.data)
            left.update(packed.left)
            keys, repeated = keys + packed.keys, repeated + packed.repeated
    return Packed(b"".join(parts), frozenset(left), keys, repeated)


class BatchStore:
    """Writes batches through `engine`; requests that ClickHouse rejects go to `refused_dir`."""

    def __init__(self, engine: Engine, refused_dir: Path, *, fast_from_spans: int = FAST_FROM_SPANS) -> None:
        self._engine = engine
        self._refused_dir = refused_dir
        self._fast_from = fast_from_spans
        self._tries = DedupTokens()
        self._received: dict[str, object] = {}  # of the current batch
        self.counts: Counter[str] = Counter()
        """Counts: rows; fast (of them, those that ClickHouse built); fast_refused (batches that it would not build); refused (dead
        letters); recovered (rows that were missing of a batch in doubt); repeated_keys (repeated attribute keys, dropped).
        """

    def store(self, batch: Batch, members: Sequence[Member], *, in_doubt: bool) -> None:
        """Insert the batch; `in_doubt`: an earlier try may have stored some of it.

        Raises ClickHouseError or UnavailableError; the caller tries again.
        """
        self._tries.begin(batch.batch_id)
        self._received = _received(members)
        spans = _place(batch, members)
        left: frozenset[int] | None = None
        doubt = in_doubt
        large = sum(len(each.numbers) for each in spans.values()) >= self._fast_from or (
            sum(request.expanded for position, request in members if position in spans) >= FAST_FROM_BYTES
        )
        if spans and large and not self._tries.built_here:
            left = _again_in_doubt(lambda: self._store_fast(batch, members, spans, in_doubt=in_doubt), in_doubt)
            doubt = in_doubt or left is None
        built: dict[str, list[_Rows]] = {}
        counts: Counter[str] = Counter()
        for member in members:
            first = {kind: parts[-1].positions[-1] + 1 for kind, parts in built.items()}
            for kind, rows in self._build(batch, member, spans.get(member[0]), left, first, counts).items():
                if rows.rows:
                    built.setdefault(kind, []).append(rows)
        for kind in built:
            _again_in_doubt(lambda kind=kind: self._insert(batch, kind, built[kind], in_doubt=doubt), doubt)
        self.counts.update(counts)
        if in_doubt and spans:
            self.refill(batch)
        faults.failpoint("inserted")

    def store_alone(self, batch: Batch, members: Sequence[Member], position: int) -> None:
        """Insert the missing rows of one request of a batch in doubt, spans in pieces of PIECE_BYTES. Raises ClickHouseError.

        The pieces have their own tokens, so an insert of the whole batch that is still running on a server would store their rows a second
        time.
        """
        self._tries.begin(batch.batch_id)
        self._received = _received(members)
        counts: Counter[str] = Counter()
        spans = _place(batch, members).get(position)
        first: Counter[str] = Counter()
        for member in members:
            if member[0] == position:
                for piece in _pieces(member[1], spans) if spans else [None]:
                    for kind, rows in self._build(batch, member, spans, piece, first, counts).items():
                        if rows.rows:
                            self._insert_again(batch, kind, rows)
                break
            first.update(_rows_by_kind(member[1]))
        self.counts.update(counts)

    def _insert_again(self, batch: Batch, kind: str, rows: _Rows) -> None:
        part = f"{kind}-{rows.member[0]}-from-{rows.positions[0]}"
        _again_in_doubt(lambda: self._insert(batch, kind, [rows], in_doubt=True, part=part), in_doubt=True)

    def refill(self, batch: Batch) -> None:
        """Insert what the views lack of a batch: a view can fail after its source was written. Raises ClickHouseError."""
        for name in REFILLS:
            self._engine.command(named_query(name), {"batch": batch.batch_id})

    def find(self, members: Sequence[Member]) -> dict[int, list[int]]:
        """Find the stored rows of these requests, whichever batch they were in (stored.py). Raises ClickHouseError."""
        return find_stored(self._engine, members)

    def _store_fast(self, batch: Batch, members: Sequence[Member], spans: Mapping[int, _Spans], *, in_doubt: bool) -> frozenset[int] | None:
        """Insert the spans that ClickHouse can build; return the BatchPos of the others, or None if it refused: some may be stored then."""
        stored = self._stored(batch, TABLES["traces"][0]) if in_doubt else frozenset[int]()
        data, left, keys, repeated = _pack(batch, members, spans, stored)
        count = sum(len(set(each.positions) - stored - left) for each in spans.values())
        if data:
            try:
                self._engine.insert_protobuf(OTLP_ROWS, OTLP_ROWS_SCHEMA, data, token=self._tries.token(FAST))
            except ClickHouseError as error:
                if not self._tries.refused(is_data_error=error.is_data_error, in_doubt=in_doubt):
                    raise
                _logger.warning("ClickHouse did not build the rows of batch %d; they are built here: %s", batch.batch_id, error)
                self.counts["fast_refused"] += 1
                return None
            expected = sum(len(set(each.positions) - left) for each in spans.values())
            (row,) = self._engine.select(
                f"SELECT count(), sum(length(SpanAttributes)) FROM {TABLES['traces'][0]} WHERE {STORED}",
                {"batch": batch.batch_id, **self._received},
            )
            if (kept := int(str(row[0]))) < expected:
                self._tries.skipped(FAST)
                raise _NotKeptError(batch, expected - kept)
            if not stored:
                self.counts[REPEATED] += repeated + keys - int(str(row[1]))  # ClickHouse keeps the first value of each key
        self.counts["fast"] += count
        self._count(count, in_doubt=in_doubt)
        return left

    def _count(self, rows: int, *, in_doubt: bool) -> None:
        self.counts["rows"] += rows
        self.counts["recovered"] += rows if in_doubt else 0

    def _insert(self, batch: Batch, kind: str, parts: list[_Rows], *, in_doubt: bool, part: str = "") -> None:
        table, columns = TABLES[kind]
        rows = _without(parts, self._stored(batch, table) if in_doubt else frozenset())
        if not rows:
            return
        part = part or f"{kind}-{parts[0].member[0]}-{parts[-1].member[0]}"
        try:
            self._engine.insert(table, columns, "\n".join(rows).encode(), token=self._tries.token(part))
        except ClickHouseError as error:
            if not error.is_data_error:
                raise
            if len(parts) == 1:
                self.refuse(parts[0].member, str(error))
                return
            half = len(parts) // 2
            self._insert(batch, kind, parts[:half], in_doubt=True)
            self._insert(batch, kind, parts[half:], in_doubt=True)
            return
        if lost := _without(parts, self._stored(batch, table)):
            self._tries.skipped(part)
            raise _NotKeptError(batch, len(lost))
        self._count(len(rows), in_doubt=in_doubt)

    def _stored(self, batch: Batch, table: str) -> frozenset[int]:
        found = self._engine.select(f"SELECT BatchPos FROM {table} WHERE {STORED}", {"batch": batch.batch_id, **self._received})
        return frozenset(int(str(row[0])) for row in found)

    def _build(
        self,
        batch: Batch,
        member: Member,
        spans: _Spans | None,
        left: Container[int] | None,
        first: Mapping[str, int],
        counts: Counter[str],
    ) -> dict[str, _Rows]:
        """Build {row kind: rows} of a request; of its spans only those at the positions `left`. `first`: next BatchPos of each kind."""
        _, request = member
        where: dict[str, Any] = {"received_ms": request.received_ms, "batch": batch.batch_id, "counts": counts}
        try:
            if spans is not None:
                positions = [position for position in spans.positions if left is None or position in left]
                if spans.numbers and not positions:
                    return {}
                rows = span_rows(request.raw, request.identities, iter(spans.numbers), **where, first=spans.first, only=left)
                return {"traces": _Rows(member, positions, rows)}
            if request.signal == "logs":
                found = {"logs": log_rows(request.raw, request.identities, **where, first=first.get("logs", 0))}
            else:
                found = metric_rows(request.raw, request.identities, **where, first=first)
            return {kind: _Rows(member, range(start := first.get(kind, 0), start + len(rows)), rows) for kind, rows in found.items()}
        except Exception as error:  # noqa: BLE001 - the boundary: one request that cannot be decoded must not block all others
            self.refuse(member, str(error))
            return {}

    def forget_dead_letters(self, log: Path, rollout_ids: Collection[str]) -> int:
        """Delete dead letters that may contain data of these rollouts, and damaged pieces of the log in the folder `log`."""
        return dead_letters.forget(self._refused_dir, log, rollout_ids)

    def expire_dead_letters(self, log: Path, before: float) -> int:
        """Delete dead letters written before a time (Unix seconds); return the number of files."""
        return dead_letters.expire(self._refused_dir, log, before)

    def refuse(self, member: Member, reason: str) -> None:
        """Write a request to a dead letter, to be examined by a person; its rows are not stored."""
        position, request = member
        kept = dead_letters.write(self._refused_dir, position, request, reason)
        self.counts["refused"] += 1
        _logger.error("a request of %d rows cannot be stored; it is a dead letter now, %s: %s", request.rows, kept, reason)

    def dead_letters(self) -> dead_letters.DeadLetters:
        """List the dead letters."""
        return dead_letters.listed(self._refused_dir)


class _NotKeptError(ClickHouseError):
    """An insert reported success but stored fewer rows. chdb does so if it cannot write the part, for example on a full disk."""

    def __init__(self, batch: Batch, rows: int) -> None:
        super().__init__(
            f"ClickHouse took batch {batch.batch_id}, but {rows} of its rows are not there: if its disk is full, make room "
            "(`agl-otel disk` shows what of a data directory is large)"
        )


def _again_in_doubt(insert: Callable[[], T], in_doubt: bool) -> T:
    """Insert; if rows are missing and the batch is in doubt, insert once more with another token.

    After a crash ClickHouse may have noted a token whose rows it does not have.
    """
    try:
        return insert()
    except _NotKeptError:
        if not in_doubt:
            raise
        return insert()


def _without(parts: Sequence[_Rows], stored: frozenset[int]) -> list[str]:
    return [row for part in parts for position, row in zip(part.positions, part.rows, strict=True) if position not in stored]
