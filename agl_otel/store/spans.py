"""The store's part for spans and traces: what was observed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from agl_otel.errors import NotFoundError
from agl_otel.queue.client import Observation
from agl_otel.spans.log_records import may_have_records, with_records
from agl_otel.store.connections import Connected, Connection
from agl_otel.store.otlp import request_of
from agl_otel.traces.reader import MANY, FoundTrace
from agl_otel.traces.span_query import SpanQuery
from agl_otel.traces.trace_query import TraceQuery
from agl_otel.types import AttemptedRollout, PaginatedResult, Rollout, Span
from agl_otel.types.columns import Traces

REQUEST_SPANS: Final = 1000  # in one request, which may have 64 MiB
_log = logging.getLogger(__name__)


class Spans(Connected):
    """Spans and what they add up to."""

    async def add_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans; those that were new, in order. They can be read when this returns, and count as a sign of life.

        A span is the same where attempt, trace id and span id are. One without a start time starts now.

        Raises:
            NotFoundError: an attempt does not exist (also a ValueError); nothing is stored.
            UsageError: an id that OpenTelemetry cannot carry (also a ValueError); nothing is stored.
            DataError: the collector refused some of them: how many, and every reason. All others are stored.
        """
        if not spans:
            return []
        connection = await self._open()
        await _check_attempts(connection, {(span.rollout_id, span.attempt_id) for span in spans})
        by_key = {(s.rollout_id, s.attempt_id, s.trace_id, s.span_id): s for s in reversed(spans)}  # of equal ones the first
        await connection.reader.barrier()
        stored = await connection.reader.stored(by_key)
        new = [span for key, span in reversed(by_key.items()) if key not in stored]
        if len(new) < len(spans):
            _log.warning("%d of %d spans are stored already and were left out", len(spans) - len(new), len(spans))
        requests = [request_of(new[start : start + REQUEST_SPANS]) for start in range(0, len(new), REQUEST_SPANS)]
        await connection.writer.write(requests)
        if new:
            heard = Counter((span.rollout_id, span.attempt_id) for span in new)
            now = time.time()
            await connection.queue.observe([Observation(*key, count, now) for key, count in heard.items()], sent_at=now)
        return new

    async def find_spans(self, query: SpanQuery) -> PaginatedResult[Span]:
        """A page of the spans of a rollout that match; all that was acked before this call is seen."""
        connection = await self._open()
        await connection.reader.barrier()
        page = await connection.reader.query_spans(query)
        return PaginatedResult(await _with_messages(connection, page), page.limit, page.offset, page.total)

    async def spans(self, rollout_ids: str | Sequence[str], *, attempt_id: str | None = None) -> list[Span]:
        """The spans of the rollouts, ordered by rollout, sequence and time, behind a barrier.

        A model call whose messages its instrumentation sent as log records has them as events or attributes.
        """
        ids = [rollout_ids] if isinstance(rollout_ids, str) else list(rollout_ids)
        connection = await self._open()
        await connection.reader.barrier()
        return await _with_messages(connection, await connection.reader.spans(ids, attempt_id=attempt_id))

    # --- looking, as viewers do: no barrier, so what has just arrived may not be there yet

    async def find_traces(self, query: TraceQuery) -> list[FoundTrace]:
        """The traces that `query` asks for, the latest first."""
        return await (await self._open()).reader.find_traces(query)

    async def rollouts_of_traces(self, trace_ids: Sequence[str]) -> list[str]:
        """The ids of the rollouts that have spans of these traces; an empty one where there are spans without ids."""
        return await (await self._open()).reader.rollouts_of_traces(trace_ids)

    async def spans_of_traces(self, trace_ids: Sequence[str], *, rollouts: Sequence[str] | None = None, limit: int = MANY) -> list[Span]:
        """All spans of some traces (32 hex digits), by trace and time; at most `limit`, the first ones.

        `rollouts` is what `rollouts_of_traces` answered, where somebody has asked already.
        """
        return await (await self._open()).reader.by_trace(trace_ids, rollouts=rollouts, limit=limit)

    async def services(self) -> list[str]:
        """Every service that spans came from."""
        return await (await self._open()).reader.services()

    async def operations(self, service: str, kind: str = "") -> list[tuple[str, str]]:
        """(span name, kind) of all that a service did; `kind` (Internal, Server, …) selects one, where it is not empty."""
        return await (await self._open()).reader.operations(service, kind)

    async def dependencies(self, start_nano: int, end_nano: int) -> list[tuple[str, str, int]]:
        """(calling service, called service, calls) of the spans that began between two times (Unix nanoseconds)."""
        return await (await self._open()).reader.dependencies(start_nano, end_nano)

    # --- what training reads

    async def traces(
        self,
        rollouts: Sequence[Rollout | AttemptedRollout | str],
        *,
        deadline_seconds: float = 5.0,
        texts: bool = False,
        barrier: bool = True,
    ) -> Traces:
        """All that was observed of the rollouts, as columns, read once behind a barrier, with a verdict for every attempt.

        What is not complete yet is asked again until `deadline_seconds` have passed. `texts`: with what was said in every call.
        Without `barrier` what has just arrived may not be there yet.
        """
        connection = await self._open()
        ids = [rollout if isinstance(rollout, str) else rollout.rollout_id for rollout in rollouts]
        found, attempts = await asyncio.gather(connection.queue.query_rollouts(rollout_id_in=ids), connection.queue.query_attempts(ids))
        by_id = {rollout.rollout_id: rollout for rollout in found}
        in_order = [by_id[rollout_id] for rollout_id in ids if rollout_id in by_id]
        return await connection.reader.traces(in_order, list(attempts), barrier=barrier, deadline_seconds=deadline_seconds, texts=texts)


async def _with_messages(connection: Connection, spans: Sequence[Span]) -> list[Span]:
    rollouts = {span.rollout_id for span in spans if may_have_records(span)}
    return with_records(spans, await connection.reader.events(sorted(rollouts))) if rollouts else list(spans)


async def _check_attempts(connection: Connection, keys: set[tuple[str, str]]) -> None:
    attempts = await connection.queue.query_attempts(sorted({rollout_id for rollout_id, _ in keys}))
    unknown = keys - {(attempt.rollout_id, attempt.attempt_id) for attempt in attempts}
    if unknown:
        rollout_id, attempt_id = min(unknown)
        raise NotFoundError(
            f"rollout {rollout_id!r} with an attempt {attempt_id!r} does not exist: start_rollout, dequeue_rollout or start_attempt first"
        )
