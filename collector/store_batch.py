"""Inserts one batch into ClickHouse exactly once: ask what is stored under its id, insert what is missing. Runs in the writer's threads.

A batch is rebuilt from its requests alone, so that its rows are the same before and after a crash. Only errors about the data make it split
the batch in half, until the request that causes them is alone and becomes a dead letter with the reason. The caller retries after any other
error.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

from agl_otel.collector import dead_letters, faults
from agl_otel.collector.core import Core, Rows, core
from agl_otel.collector.dedup_tokens import DedupTokens
from agl_otel.collector.expansion import size_of
from agl_otel.collector.journal import Batch, Member, Request, assign
from agl_otel.collector.metrics import TABLES as METRIC_TABLES
from agl_otel.collector.metrics import MetricRows, kinds_of
from agl_otel.collector.stored import find_stored
from agl_otel.collector.values import REPEATED
from agl_otel.traces.engine import DATABASE, ClickHouseError, Engine
from agl_otel.traces.sql import REFILLS, named_query

TABLES: Final = {"traces": f"{DATABASE}.otel_traces", "logs": f"{DATABASE}.otel_logs", **METRIC_TABLES}
"""{kind of row: table}."""
PIECE_BYTES: Final = 8 << 20  # of rows, when a start has died on the batch
T = TypeVar("T")
_logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """What one request adds to a table."""

    member: Member
    positions: range
    """BatchPos of its rows."""
    numbers: Sequence[int]
    """Sequence number of each row; data points have none."""


def _numbers(request: Request, following: dict[str, int]) -> dict[str, Sequence[int]]:
    """Return {kind of row: sequence number of each row}, 0 for data points; `following`: see `assign`."""
    if request.signal == "traces":
        return {"traces": assign(request.identities, following)}
    if request.signal == "logs":
        return {"logs": [number for count, each in request.identities.runs if not each.reason for number in [each.sequence or 0] * count]}
    kinds = kinds_of(ExportMetricsServiceRequest.FromString(request.raw))
    taken = (kind for kind, each in zip(kinds, request.identities, strict=True) if kind is not None and not each.reason)
    return {kind: [0] * count for kind, count in Counter(taken).items()}


def _parts(batch: Batch, members: Sequence[Member]) -> dict[str, list[_Part]]:
    """Return {kind of row: parts}. A request that cannot be decoded keeps its positions."""
    following = dict(batch.numbers)
    parts: dict[str, list[_Part]] = {}
    for member in members:
        for kind, own in _numbers(member[1], following).items():
            before = parts.setdefault(kind, [])
            first = before[-1].positions.stop if before else 0
            before.append(_Part(member, range(first, first + len(own)), own))
    return parts


def _pieces(part: _Part) -> list[range]:
    """Split the positions of a request's rows into ranges whose rows take about PIECE_BYTES."""
    _, request = part.member
    each = max(1, len(request.identities) * PIECE_BYTES // size_of(request))
    return [part.positions[start : start + each] for start in range(0, len(part.positions), each)]


class _Place(NamedTuple):
    """Where the rows of a batch are."""

    batch_id: int
    received: tuple[int, int]
    """The first and the last time of receipt (Unix milliseconds): it lets ClickHouse skip other parts by their metadata."""

    def rows(self, kind: str, positions: range) -> str:
        """Format FROM and WHERE for the rows at these positions."""
        first, last = (f"fromUnixTimestamp64Milli({stamp})" for stamp in self.received)
        return (
            f"{TABLES[kind]} WHERE BatchId = {self.batch_id} AND ReceivedAt BETWEEN {first} AND {last} "
            f"AND BatchPos BETWEEN {positions.start} AND {positions.stop - 1}"
        )


def _place(batch: Batch, members: Sequence[Member]) -> _Place:
    received = [request.received_ms for _, request in members]
    return _Place(batch.batch_id, (min(received), max(received)))


class BatchStore:
    """Writes batches through `engine`, with rows that `used_core` builds (the default one); what is rejected goes to `refused_dir`."""

    def __init__(self, engine: Engine, refused_dir: Path, used_core: Core | None = None) -> None:
        self._engine = engine
        self._core = used_core or core()
        self._refused_dir = refused_dir
        self._tries = DedupTokens()
        self._counting = threading.Lock()
        self.counts: Counter[str] = Counter()
        """Counts: rows; refused (dead letters); recovered (rows that were missing of a batch in doubt); repeated_keys (repeated attribute
        keys, dropped).
        """

    def store(self, batch: Batch, members: Sequence[Member], *, in_doubt: bool) -> None:
        """Insert the batch; `in_doubt`: an earlier try may have stored some of it.

        Raises ClickHouseError or UnavailableError; the caller tries again.
        """
        place = _place(batch, members)
        parts = _parts(batch, members)
        for kind, own in parts.items():
            _again_in_doubt(lambda kind=kind, own=own: self._insert(place, kind, own, in_doubt=in_doubt), in_doubt)
        if in_doubt and "traces" in parts:
            self.refill(batch)
        self._tries.forget(batch.batch_id)
        faults.failpoint("inserted")

    def store_alone(self, batch: Batch, members: Sequence[Member], position: int) -> None:
        """Insert the missing rows of one request of a batch in doubt, in pieces of PIECE_BYTES. Raises ClickHouseError.

        The pieces have their own tokens, so an insert of the whole batch that is still running on a server would store their rows a second
        time.
        """
        place = _place(batch, members)
        for kind, parts in _parts(batch, members).items():
            for part in parts:
                if part.member[0] == position:
                    for piece in _pieces(part):
                        token = f"{kind}-{position}-from-{piece.start}"
                        _again_in_doubt(
                            lambda kind=kind, part=part, piece=piece, token=token: self._insert(
                                place, kind, [part], in_doubt=True, token=token, only=piece
                            ),
                            in_doubt=True,
                        )

    def refill(self, batch: Batch) -> None:
        """Insert what the views lack of a batch: a view can fail after its source was written. Raises ClickHouseError."""
        for name in REFILLS:
            self._engine.command(named_query(name), {"batch": batch.batch_id})

    def find(self, members: Sequence[Member]) -> dict[int, list[int]]:
        """Find the stored rows of these requests, whichever batch they were in (stored.py). Raises ClickHouseError."""
        return find_stored(self._engine, members)

    def _insert(
        self, place: _Place, kind: str, parts: Sequence[_Part], *, in_doubt: bool, token: str = "", only: range | None = None
    ) -> None:
        """Insert parts that follow each other, of them the positions in `only`, as one insert with this token."""
        wanted = only or range(parts[0].positions.start, parts[-1].positions.stop)
        stored = self._stored(place, kind, wanted) if in_doubt else frozenset[int]()
        rows = self._build(place.batch_id, kind, parts, wanted, stored)
        count, repeated = len(rows), rows.repeated
        if not count:
            return
        token = token or f"{kind}-{parts[0].member[0]}-{parts[-1].member[0]}"
        try:
            self._engine.insert(
                TABLES[kind], rows.columns, rows.take(), format_name=rows.format_name, token=self._tries.token(place.batch_id, token)
            )
        except ClickHouseError as error:
            if not error.is_data_error:
                raise
            if len(parts) == 1:
                self.refuse(parts[0].member, str(error))
                return
            half = len(parts) // 2
            self._insert(place, kind, parts[:half], in_doubt=True)
            self._insert(place, kind, parts[half:], in_doubt=True)
            return
        (kept,) = self._engine.select(f"SELECT uniqExact(BatchPos) FROM {place.rows(kind, wanted)}")[0]
        if (lost := count + len(stored) - int(str(kept))) > 0:
            self._tries.skipped(place.batch_id, token)
            raise _NotKeptError(place.batch_id, lost)
        with self._counting:
            self.counts["rows"] += count
            self.counts["recovered"] += count if in_doubt else 0
            self.counts[REPEATED] += 0 if in_doubt else repeated

    def _build(self, batch_id: int, kind: str, parts: Sequence[_Part], wanted: range, stored: frozenset[int]) -> Rows:
        """Build the rows at the positions `wanted` that are not `stored`."""
        rows = self._core.rows(kind) if kind in ("traces", "logs") else MetricRows(kind)
        for part in parts:
            only = frozenset(part.positions).intersection(wanted) - stored if stored or len(wanted) < len(part.positions) else None
            if only is not None and not only:
                continue
            try:
                rows.add(part.member[1], part.numbers, batch=batch_id, first=part.positions.start, only=only)
            except Exception as error:  # noqa: BLE001 - the boundary: one request that cannot be decoded must not block all others
                self.refuse(part.member, str(error))
        return rows

    def _stored(self, place: _Place, kind: str, wanted: range) -> frozenset[int]:
        found = self._engine.select(f"SELECT DISTINCT BatchPos FROM {place.rows(kind, wanted)}")
        return frozenset(int(str(row[0])) for row in found)

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
        with self._counting:
            self.counts["refused"] += 1
        _logger.error("a request of %d rows cannot be stored; it is a dead letter now, %s: %s", request.rows, kept, reason)

    def dead_letters(self) -> dead_letters.DeadLetters:
        """List the dead letters."""
        return dead_letters.listed(self._refused_dir)


class _NotKeptError(ClickHouseError):
    """An insert reported success but stored fewer rows. chdb does so if it cannot write the part, for example on a full disk."""

    def __init__(self, batch_id: int, rows: int) -> None:
        super().__init__(
            f"ClickHouse took batch {batch_id}, but {rows} of its rows are not there: if its disk is full, make room "
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
