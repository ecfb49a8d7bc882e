"""The part of the store for spans and traces: the observations."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Final

from agl_otel.errors import NotFoundError
from agl_otel.queue.client import Observation
from agl_otel.spans.log_records import may_have_records, with_evaluations, with_records
from agl_otel.store.connections import Connected, Connection
from agl_otel.store.otlp import request_of
from agl_otel.traces.span_query import SpanQuery
from agl_otel.traces.trace_query import MANY, FoundTrace, TraceQuery
from agl_otel.types import AttemptedRollout, PaginatedResult, Rollout, Span

if TYPE_CHECKING:
    from agl_otel.types.columns import Traces

REQUEST_SPANS: Final = 1000  # most spans in one request, which may have 64 MiB
_log = logging.getLogger(__name__)


class Spans(Connected):
    """Spans, and the traces and training data made of them."""

    async def add_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans and return the new ones, in order. They are readable when this returns, and count as a heartbeat.

        Spans with the same attempt, trace id and span id are the same. A span without a start time starts now.

        Raises:
            NotFoundError: an attempt does not exist (also a ValueError); nothing is stored.
            UsageError: an id that OpenTelemetry cannot carry (also a ValueError); nothing is stored.
            DataError: the collector refused some spans (with number and reasons); all others are stored.
        """
        if not spans:
            return []
        connection = await self._open()
        await _check_attempts(connection, {(span.rollout_id, span.attempt_id) for span in spans})
        by_key = {(s.rollout_id, s.attempt_id, s.trace_id, s.span_id): s for s in reversed(spans)}  # the first of duplicates
        await connection.reader.barrier()
        stored = await connection.reader.stored(by_key)
        new = [span for key, span in reversed(by_key.items()) if key not in stored]
        if len(new) < len(spans):
            _log.warning("%d of %d spans are stored already and were left out", len(spans) - len(new), len(spans))
        requests = [request_of(new[start : start + REQUEST_SPANS]) for start in range(0, len(new), REQUEST_SPANS)]
        await connection.writer.write(requests)
        if new:
            counts = Counter((span.rollout_id, span.attempt_id) for span in new)
            now = time.time()
            await connection.queue.observe([Observation(*key, count, now) for key, count in counts.items()], sent_at=now)
        return new

    async def find_spans(self, query: SpanQuery) -> PaginatedResult[Span]:
        """Return a page of the matching spans of a rollout, behind a barrier."""
        connection = await self._open()
        await connection.reader.barrier()
        page = await connection.reader.query_spans(query)
        whole = query.is_whole and len(page) == page.total
        spans = await _with_records(connection, page, [query.rollout_id], query.attempt_id, whole=whole)
        return PaginatedResult(spans, page.limit, page.offset, page.total)

    async def spans(
        self, rollout_ids: str | Sequence[str], *, attempt_id: str | None = None, evaluations: Collection[int] | None = None
    ) -> list[Span]:
        """Return the spans of the rollouts, ordered by rollout, sequence and time, behind a barrier.

        Messages and evaluations that were sent as log records appear as events or attributes of their span; of the evaluations only those
        of `evaluations` (Traces.evaluations of an earlier read), if given.
        """
        ids = [rollout_ids] if isinstance(rollout_ids, str) else list(rollout_ids)
        connection = await self._open()
        await connection.reader.barrier()
        return await _with_records(
            connection, await connection.reader.spans(ids, attempt_id=attempt_id), ids, attempt_id, whole=True, known=evaluations
        )

    # --- for viewers: without a barrier, so the latest spans may be missing

    async def find_traces(self, query: TraceQuery) -> list[FoundTrace]:
        """Return the traces that match `query`, the latest first."""
        return await (await self._open()).reader.find_traces(query)

    async def rollouts_of_traces(self, trace_ids: Sequence[str]) -> list[str]:
        """Return the ids of rollouts with spans in these traces; an empty id stands for spans without a rollout."""
        return await (await self._open()).reader.rollouts_of_traces(trace_ids)

    async def spans_of_traces(self, trace_ids: Sequence[str], *, rollouts: Sequence[str] | None = None, limit: int = MANY) -> list[Span]:
        """Return the spans of some traces (32 hex digits), by trace and time; at most the first `limit`.

        `rollouts` is the result of `rollouts_of_traces`, if known.
        """
        return await (await self._open()).reader.by_trace(trace_ids, rollouts=rollouts, limit=limit)

    async def services(self) -> list[str]:
        """Return the names of all services with spans."""
        return await (await self._open()).reader.services()

    async def operations(self, service: str, kind: str = "") -> list[tuple[str, str]]:
        """Return (span name, kind) of a service's operations, only of `kind` (Internal, Server, …) if not empty."""
        return await (await self._open()).reader.operations(service, kind)

    async def dependencies(self, start_nano: int, end_nano: int) -> list[tuple[str, str, int]]:
        """Return (caller, callee, calls) between services for spans that began between two times (Unix nanoseconds)."""
        return await (await self._open()).reader.dependencies(start_nano, end_nano)

    # --- for training

    async def traces(
        self,
        rollouts: Sequence[Rollout | AttemptedRollout | str],
        *,
        deadline_seconds: float = 5.0,
        texts: bool = False,
        tree: bool = False,
        barrier: bool = True,
        evaluations: Collection[int] | None = None,
    ) -> Traces:
        """Read all observations of the rollouts as columns, behind a barrier, with a verdict for every attempt.

        Incomplete attempts are read again until `deadline_seconds` have passed. `texts`: include the content of every call;
        `tree`: all spans with their parents, for credit (adapters/credit.py). Without `barrier` the latest spans may be missing.
        `evaluations`: of those that came as log records, as feedback does, these alone (Traces.evaluations of an earlier read).
        """
        connection = await self._open()
        ids = [rollout if isinstance(rollout, str) else rollout.rollout_id for rollout in rollouts]
        found, attempts = await asyncio.gather(connection.queue.query_rollouts(rollout_id_in=ids), connection.queue.query_attempts(ids))
        by_id = {rollout.rollout_id: rollout for rollout in found}
        in_order = [by_id[rollout_id] for rollout_id in ids if rollout_id in by_id]
        return await connection.reader.traces(
            in_order,
            list(attempts),
            barrier=barrier,
            deadline_seconds=deadline_seconds,
            texts=texts,
            tree=tree,
            evaluations=evaluations,
        )


async def _with_records(
    connection: Connection,
    spans: Sequence[Span],
    rollout_ids: Sequence[str],
    attempt_id: str | None,
    *,
    whole: bool,
    known: Collection[int] | None = None,
) -> list[Span]:
    """Add what came as log records; `whole`: these are all spans of the rollouts, or of the attempt; `known`: Store.spans."""
    rollouts = {span.rollout_id for span in spans if may_have_records(span)}
    messages, evaluations = await asyncio.gather(
        connection.reader.events(sorted(rollouts)), connection.reader.evaluations(sorted(set(rollout_ids)))
    )
    own = [each for each in evaluations if not attempt_id or each["attempt_id"] == attempt_id]
    own = own if known is None else [each for each in own if int(each["row"]["Identity"]) in known]
    return with_evaluations(with_records(spans, messages), own, whole=whole)


async def _check_attempts(connection: Connection, keys: set[tuple[str, str]]) -> None:
    attempts = await connection.queue.query_attempts(sorted({rollout_id for rollout_id, _ in keys}))
    unknown = keys - {(attempt.rollout_id, attempt.attempt_id) for attempt in attempts}
    if unknown:
        rollout_id, attempt_id = min(unknown)
        raise NotFoundError(
            f"rollout {rollout_id!r} with an attempt {attempt_id!r} does not exist: start_rollout, dequeue_rollout or start_attempt first"
        )
