"""What is stored, by named queries (sql/) over ClickHouse's HTTP protocol, embedded or a server: without waiting, and without verdicts."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Final, Literal, Self, TypeVar

from agl_otel.errors import QueryError, UnavailableError, UsageError
from agl_otel.traces.collector_client import barriers
from agl_otel.traces.figures import AttemptFigures, OutlineSpan, attempt_figures, joined, outline
from agl_otel.traces.http import TIMEOUT_SECONDS, ClickHouseHttp
from agl_otel.traces.names import OUTPUT_MESSAGES, names_in
from agl_otel.traces.rows import evaluation_of, event_of, span_of
from agl_otel.traces.span_query import SpanQuery
from agl_otel.traces.sql import named_query
from agl_otel.traces.steps import NAMES as STEP_NAMES
from agl_otel.traces.steps import publishing_step_of, run_of, stages_of, steps_of, trace_id_of
from agl_otel.traces.tokens import Table
from agl_otel.traces.trace_query import MANY, FoundTrace, TraceQuery
from agl_otel.types import Attempt, Describe, PaginatedResult, PublishingStep, Span, TrainingRun, TrainingStage, TrainingStep
from agl_otel.types.columns import AttemptKey
from agl_otel.types.scores import MAX_REWARD
from agl_otel_hook import conventions

T = TypeVar("T")
LOOK_BACK_SECONDS: Final = (600, 6 * 3600)
"""How far back a search for traces looks, before it searches everything."""
LISTED: Final = 5_000  # most ids in one condition; more are read as a range, which is contiguous in ClickHouse
SpanKey = tuple[str, str, str, str]
"""(rollout id, attempt id, trace id, span id)."""
_OWN_FORMAT: Final = re.compile(
    r"\b(FORMAT\s+`?\w+`?)(?:\s+SETTINGS\b[^()';/]{0,200})?(?:[\s;]|--[^\n]*|(?>/\*.*?\*/))*+$", re.IGNORECASE | re.DOTALL
)
LOOKUP_SECONDS: Final = 2.0  # bound of one look-up of the collectors, within a read's deadline
LARGE_BYTES: Final = 1 << 20  # larger answers are parsed in a thread beside the event loop
ROLLOUTS_PER_QUERY: Final = 2000  # more in one query take as long for each, and reach ClickHouse's limits of time and memory
TIMED_OUT: Final = 159
TOO_LARGE: Final = frozenset({158, 173, 241, 307, 396})
"""ClickHouse's error codes for limits of rows, bytes and memory: a read of fewer rollouts may succeed, as after TIMED_OUT."""
OF_ALL: Final = "(total)"  # marks the limit on a whole server's memory, which other queries use up
_log = logging.getLogger(__name__)


class TraceQueries:
    """Reads traces from `clickhouse_url` or, if that does not answer, from another address in `endpoints` of the same ClickHouse.

    `collectors` are the HTTP addresses for barriers. Before each, and when one does not answer, `where` returns the stack's current
    addresses: a collector may have been added, or restarted on other ports.
    """

    def __init__(
        self,
        clickhouse_url: str,
        *,
        collectors: Sequence[str] = (),
        endpoints: Sequence[str] = (),
        token: str = "",
        where: Callable[[], Awaitable[Describe]] | None = None,
    ) -> None:
        self._http = ClickHouseHttp(clickhouse_url, token=token)
        self._where = where
        self._endpoints = tuple(address.rstrip("/") for address in endpoints)
        self.collectors = tuple(address.rstrip("/") for address in collectors)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def barrier(self, *, patience_seconds: float | None = None) -> None:
        """Wait until everything that the collectors have acked is visible.

        Raises UnavailableError if one does not answer, or can store nothing for `patience_seconds` (default: `barriers`').
        """
        await self._look_up()
        await self._once_moved(lambda: self._barriers(patience_seconds))

    async def _barriers(self, patience_seconds: float | None) -> None:
        await barriers(self._http.session, self.collectors, seconds=TIMEOUT_SECONDS, patience_seconds=patience_seconds)

    async def _look_up(self) -> bool:
        """Look up the addresses of collectors and ClickHouse; return whether they changed. While the queue is away they are kept."""
        if self._where is None:
            return False
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                found = await self._where()
        except (TimeoutError, UnavailableError):
            return False
        collectors, endpoints = (tuple(each.rstrip("/") for each in given) for given in (found.collectors, found.clickhouses))
        if not collectors or found.clickhouse is None or (collectors, endpoints) == (self.collectors, self._endpoints):
            return False
        self.collectors, self._endpoints, self._http.url = collectors, endpoints, found.clickhouse.rstrip("/")
        return True

    async def _once_moved(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Await `ask()`; once more where it finds nobody and the stack has moved."""
        try:
            return await ask()
        except UnavailableError:
            if not await self._look_up():
                raise
        return await ask()

    async def _fetch(self, *query: Any, **options: Any) -> bytearray:
        """Run a query as ClickHouseHttp.fetch does, also where the stack has moved."""
        return await self._once_moved(lambda: self._http.fetch(*query, **options))

    async def query(self, sql: str, *, params: Mapping[str, object] | None = None, own: bool = True) -> list[dict[str, Any]]:
        """Run a query and return its rows as dicts; `params` fill `{name:Type}` in the SQL. Raises QueryError; UsageError as `sql`.

        `own`: a query of the program itself, which never waits behind users' queries (Grafana, the dashboard's SQL page).
        """
        if not own:
            _refuse_format(sql)
        return await self._read(sql, params, lambda body: list(_rows(body)), own=own)

    async def arrow(self, sql: str, *, params: Mapping[str, object] | None = None) -> Table:
        """Run a query and return an Arrow table."""
        fetched = self._fetch(sql, "Arrow", params)
        body, pa = await asyncio.gather(fetched, asyncio.to_thread(importlib.import_module, "pyarrow"))  # the first import takes a second
        with pa.ipc.open_file(pa.BufferReader(body)) as file:
            return file.read_all()

    async def spans(self, rollout_ids: Sequence[str], *, attempt_id: str | None = None) -> list[Span]:
        """Return the typed spans of some rollouts, or of one attempt of theirs, without duplicates, by (rollout, sequence, time)."""
        if not rollout_ids:
            return []
        one_thread = "\nSETTINGS max_threads = 1" if len(rollout_ids) == 1 else ""  # for so few rows two take longer
        query = named_query("spans") + one_thread

        async def read(some: Sequence[str]) -> list[Span]:
            return await self._read(query, {"rollouts": list(some), "attempt": attempt_id or ""}, _spans_each_once)

        parts, unread = await in_parts(read, rollout_ids)
        if unread:
            raise next(iter(unread.values()))
        return [span for part in parts for span in part]

    async def events(self, rollout_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the gen_ai events that arrived as log records, by time, for spans.log_records.with_records."""
        if not rollout_ids:
            return []
        return [event_of(row) for row in await self.query(named_query("events"), params={"rollouts": list(rollout_ids)})]

    async def evaluations(self, rollout_ids: Sequence[str]) -> list[dict[str, Any]]:
        """Return the evaluations that arrived as log records, by time, for spans.log_records.with_evaluations."""
        if not rollout_ids:
            return []
        return [evaluation_of(row) for row in await self.query(named_query("evaluations"), params={"rollouts": list(rollout_ids)})]

    async def printed(self, rollout_id: str) -> dict[tuple[str, str], str]:
        """Return {(attempt id, stdout or stderr): the agent's stored output} of one rollout."""
        found: dict[tuple[str, str], str] = {}
        for row in await self.query(named_query("printed"), params={"rollout": rollout_id, "stream": conventions.LOG_STREAM}):
            key = (row["AttemptId"], row["Stream"])
            found[key] = found.get(key, "") + row["Body"]
        return found

    async def rollouts_of_traces(self, trace_ids: Sequence[str]) -> list[str]:
        """Return the rollouts with spans in these traces (hex ids); an empty id stands for spans without a rollout."""
        if not trace_ids:
            return []
        rows = await self.query(named_query("trace_rollouts"), params={"traces": list(trace_ids)})
        return [row["RolloutId"] for row in rows]

    async def named_by(self, name: str) -> list[tuple[Literal["trace", "rollout", "conversation"], str]]:
        """Return what an id names in the trace store, as (kind, rollout).

        It is a trace, with at most two rollouts of its spans (an empty one: spans without ids), a conversation, with the rollout that
        continued it last, or a rollout.
        """
        rows = await self.query(named_query("named_by"), params={"id": name, "limit": 2})
        return [(row["Kind"], row["RolloutId"]) for row in rows]

    async def by_trace(self, trace_ids: Sequence[str], *, rollouts: Sequence[str] | None = None, limit: int = MANY) -> list[Span]:
        """Return the spans of some traces (hex ids), by (trace, time), one per (trace id, span id), preferably one with a rollout id.

        At most the first `limit`. `rollouts` is the result of `rollouts_of_traces`, if known.
        """
        rollouts = await self.rollouts_of_traces(trace_ids) if rollouts is None else rollouts
        if not rollouts:
            return []
        params = {"traces": list(trace_ids), "rollouts": list(rollouts), "limit": limit, **names_in("by_trace", STEP_NAMES)}
        return (await self._spans(named_query("by_trace"), params))[0]

    async def find_traces(self, query: TraceQuery) -> list[FoundTrace]:
        """Return the traces that match `query`, the latest first.

        The last minutes of the requested time are searched first, and all of it only if they hold fewer than `limit` traces. (If they hold
        enough, those are the latest; a trace's start is then that of its first span within the searched time.)
        """
        if not query.is_narrow:
            last = int((await self.query(named_query("last_receipt")))[0]["LastNano"])
            for seconds in LOOK_BACK_SECONDS:
                part = query.since(min(last, query.end_nano) - seconds * 10**9)
                found = await self._found(part) if part else []
                if len(found) == query.limit:
                    return found
        return await self._found(query)

    async def _found(self, query: TraceQuery) -> list[FoundTrace]:
        return [
            FoundTrace(row["TraceId"], int(row["StartNano"]), int(row["EndNano"]))
            for row in await self.query(query.sql, params=query.params)
        ]

    async def services(self) -> list[str]:
        """Return the names of all services with spans."""
        return [row["ServiceName"] for row in await self.query(named_query("services"))]

    async def operations(self, service: str, kind: str = "") -> list[tuple[str, str]]:
        """Return (span name, kind) of a service's operations, only of `kind` (Internal, Server, …) if not empty."""
        rows = await self.query(named_query("operations"), params={"service": service, "kind": kind})
        return [(row["SpanName"], row["SpanKind"]) for row in rows]

    async def dependencies(self, start_nano: int, end_nano: int) -> list[tuple[str, str, int]]:
        """Return (caller, callee, calls) between services for spans that began between two times (Unix nanoseconds)."""
        rows = await self.query(named_query("dependencies"), params={"first": start_nano, "last": end_nano})
        return [(row["Caller"], row["Callee"], int(row["Calls"])) for row in rows]

    async def query_spans(self, query: SpanQuery) -> PaginatedResult[Span]:
        """Return one page of the spans that match `query`."""
        spans, total = await self._spans(query.page_sql, query.params)
        if not spans and (query.offset > 0 or query.limit == 0):  # a page past the end has no row with the total
            total = int((await self.query(query.count_sql, params=query.params))[0]["Total"])
        return PaginatedResult(spans, query.limit, query.offset, total)

    async def _spans(self, sql: str, params: Mapping[str, object]) -> tuple[list[Span], int]:
        """Return spans, and the total number from their rows."""
        return await self._read(sql, params, _spans_in)

    async def _read(self, sql: str, params: Mapping[str, object] | None, made_of: Callable[[bytearray], T], *, own: bool = True) -> T:
        """Run a query and return `made_of` its rows (JSON lines); many rows take seconds, so a thread converts them."""
        body = await self._fetch(sql, "JSONEachRow", params, own=own)
        return await asyncio.to_thread(made_of, body) if len(body) > LARGE_BYTES else made_of(body)

    async def figures(self, attempts: Sequence[Attempt]) -> list[AttemptFigures]:
        """Return verdict, reward and sizes of these attempts, in order, without reading tokens or texts.

        If one that has just ended is incomplete, all are read again behind a barrier: a collector may still hold its last spans.
        """
        ids = sorted({attempt.rollout_id for attempt in attempts})
        if not ids:
            return []

        async def read() -> list[AttemptFigures]:
            return attempt_figures(await self.arrow(named_query("figures"), params=params_of("figures", ids)), attempts, time.time())

        found = await read()
        if any(not each.final and attempt.end_time is not None for each, attempt in zip(found, attempts, strict=True)):
            try:
                await self.barrier()
            except UnavailableError as error:
                _log.warning("figures are read without what the collectors acked last: %s", error)
            found = await read()
        return found

    async def outputs(self, attempts: Sequence[Attempt], *, limit: int) -> dict[tuple[str, str], str]:
        """Return {(rollout, attempt): first `limit` bytes of the last model reply (OUTPUT_MESSAGES, JSON)} for attempts with one."""
        ids = sorted({attempt.rollout_id for attempt in attempts})
        if not ids:
            return {}
        given = {"rollouts": ids, "output": OUTPUT_MESSAGES, "limit": limit}
        found = {(row["RolloutId"], row["AttemptId"]): row["Reply"] for row in await self.query(named_query("outputs"), params=given)}
        return {key: found[key] for key in ((a.rollout_id, a.attempt_id) for a in attempts) if key in found}

    async def outputs_containing(self, attempts: Sequence[Attempt], text: str) -> set[str]:
        """Return the rollouts of those attempts whose last model reply contains `text`, literally or JSON-escaped."""
        of = {attempt.rollout_id: attempt.attempt_id for attempt in attempts}
        if not of:
            return set()
        given = {"rollouts": sorted(of), "attempts": list(of.values()), "output": OUTPUT_MESSAGES}
        rows = await self.query(named_query("outputs_containing"), params={**given, "text": text, "escaped": json.dumps(text)[1:-1]})
        return {row["RolloutId"] for row in rows}

    async def run_figures(self, rollout_ids: Sequence[str]) -> Table:
        """Return one row per rollout with spans (sql/run_figures.sql); for more than LISTED rollouts also rows of others."""
        given = {"first": min(rollout_ids), "last": max(rollout_ids), "max_reward": MAX_REWARD, **names_in("run_figures")}
        listed = list(rollout_ids) if len(rollout_ids) <= LISTED else []
        return await self.arrow(named_query("run_figures"), params={**given, "rollouts": listed})

    async def outline(self, rollout_id: str, *, attempt_id: str = "", limit: int, offset: int = 0) -> tuple[list[OutlineSpan], int]:
        """Return `limit` spans of a rollout or attempt, by time, and their total number (0 if `offset` is past the end)."""
        given = {**params_of("outline", [rollout_id]), "attempt_id": attempt_id, "limit": limit, "offset": offset}
        rows, records = await asyncio.gather(self.query(named_query("outline"), params=given), self.evaluations([rollout_id]))
        total = int(rows[0]["Total"]) if rows else 0
        return joined(outline(rows, records)), total

    async def sql(self, query: str, *, limit: int) -> dict[str, Any]:
        """Run a user's query; return ClickHouse's JSONCompact: `meta` (name and type of each column) and `data` (at most `limit` rows).

        Raises UsageError if the query names a FORMAT, QueryError if the endpoint, which decides what may run and its limits, refuses it.
        """
        _refuse_format(query)
        return json.loads(await self._fetch(query, "JSONCompact", settings={"limit": limit}, own=False))

    async def stored(self, keys: Collection[SpanKey]) -> set[SpanKey]:
        """Return those of these spans that are already stored."""
        names = [sorted({key[place] for key in keys}) for place in (0, 1, 3)]
        rows = await self.query(named_query("identities"), params=dict(zip(("rollouts", "attempts", "spans"), names, strict=True)))
        found = {(row["RolloutId"], row["AttemptId"], row["TraceId"], row["SpanId"]) for row in rows}
        return found.intersection(keys)

    async def roots(self, rollout_ids: Sequence[str]) -> dict[AttemptKey, tuple[str, str]]:
        """Return {(rollout id, attempt id): (trace id, span id) of its root span} for attempts of these rollouts with spans."""
        rows: list[dict[str, Any]] = []
        for start in range(0, len(rollout_ids), ROLLOUTS_PER_QUERY):
            some = list(rollout_ids[start : start + ROLLOUTS_PER_QUERY])
            rows += await self.query(named_query("roots"), params={"rollouts": some, "attempt": conventions.SPAN_ATTEMPT})
        return {(row["RolloutId"], row["AttemptId"]): (row["TraceId"], row["SpanId"]) for row in rows}

    async def known_steps(self, trace_id: str, span_ids: Sequence[str]) -> dict[str, str]:
        """Return {span id: digest} of a training run's spans that are stored."""
        params = {"trace": trace_id, "spans": list(span_ids), **names_in("known_steps", STEP_NAMES)}
        return {row["SpanId"]: row["Digest"] for row in await self.query(named_query("known_steps"), params=params)}

    async def steps(self, run_id: str, *, version: str = "") -> list[TrainingStep]:
        """Return the steps of a training run in order, only those that made `version` if not empty."""
        given = {"trace": trace_id_of(run_id), "version": version}
        return steps_of(run_id, await self.query(named_query("steps"), params={**given, **names_in("steps", STEP_NAMES)}))

    async def stages(self, run_id: str) -> list[TrainingStage]:
        """Return the stages of a training run's steps, in the order of their ends, each as it was recorded last."""
        given = {"trace": trace_id_of(run_id)}
        return stages_of(run_id, await self.query(named_query("stages"), params={**given, **names_in("stages", STEP_NAMES)}))

    async def runs(self, limit: int, *, run_id: str = "") -> list[TrainingRun]:
        """Return the training runs with the latest steps, the latest first; with `run_id` that one alone."""
        given = {"limit": limit, "trace": trace_id_of(run_id) if run_id else ""}
        rows = await self.query(named_query("runs"), params={**given, **names_in("runs", STEP_NAMES)})
        return [run_of(row) for row in rows]

    async def publishing_steps(self, resources_id: str, limit: int) -> list[PublishingStep]:
        """Return the steps of training runs that published versions of a set of resources, the latest first."""
        given = {"set": resources_id, "limit": limit}
        rows = await self.query(named_query("publishing_steps"), params={**given, **names_in("publishing_steps", STEP_NAMES)})
        return [publishing_step_of(row) for row in rows]

    async def count(self) -> int:
        """Count all stored spans, with and without a rollout."""
        return int((await self.query(named_query("totals")))[0]["Spans"])


async def in_parts(read: Callable[[Sequence[str]], Awaitable[T]], ids: Iterable[str]) -> tuple[list[T], dict[str, QueryError]]:
    """Read rollouts by the order of their ids, in which neighbours lie together; return the parts, and {rollout too large alone: why}."""
    ordered = sorted(set(ids))
    parts, unread = list[T](), dict[str, QueryError]()
    for start in range(0, len(ordered), ROLLOUTS_PER_QUERY):
        some, failed = await _halved(read, ordered[start : start + ROLLOUTS_PER_QUERY])
        parts += some
        unread |= failed
    return parts, unread


async def _halved(read: Callable[[Sequence[str]], Awaitable[T]], ids: Sequence[str]) -> tuple[list[T], dict[str, QueryError]]:
    """Read rollouts at once or, if that is too large or takes too long, in halves."""
    try:
        return [await read(ids)], {}
    except QueryError as error:
        if OF_ALL in str(error) or error.code not in (TOO_LARGE if len(ids) == 1 else {*TOO_LARGE, TIMED_OUT}):
            raise
        if len(ids) == 1:
            return [], {ids[0]: error}
    middle = len(ids) // 2
    first, unread = await _halved(read, ids[:middle])
    second, more = await _halved(read, ids[middle:])
    return [*first, *second], unread | more


def _refuse_format(query: str) -> None:
    """Raise UsageError if a user's query names the format of its answer."""
    if found := _OWN_FORMAT.search(query):
        raise UsageError(f"the answer is JSON here: leave `{found[1]}` out, or ask ClickHouse's HTTP interface for it")


def _rows(body: bytearray) -> Iterator[dict[str, Any]]:
    """Yield the rows of an answer in JSONEachRow, emptying it on the way, so that the results take over its memory."""
    while body:
        end = body.index(b"\n") + 1
        row = json.loads(body[:end])
        del body[:end]
        yield row


def _spans_in(body: bytearray) -> tuple[list[Span], int]:
    """Convert row by row: the dicts of a large rollout need more memory than its spans."""
    spans: list[Span] = []
    total = 0
    for row in _rows(body):
        total = int(row.get("Total", 0))
        spans.append(span_of(row))
    return spans, total


def _spans_each_once(body: bytearray) -> list[Span]:
    """Convert rows to spans in reading order; of the rows of one identity, that with the lowest sequence counts."""
    keyed = [
        ((row["RolloutId"], int(row["SequenceId"]), int(row["StartNano"]), row["AttemptId"], row["SpanId"]), span_of(row))
        for row in _rows(body)
    ]
    keyed.sort(key=itemgetter(0))
    once: dict[SpanKey, Span] = {}
    for _, span in keyed:
        once.setdefault((span.rollout_id, span.attempt_id, span.trace_id, span.span_id), span)
    return list(once.values())


def params_of(name: str, ids: Sequence[str]) -> dict[str, object]:
    """Return the parameters of a named query of rollouts."""
    return {"rollouts": list(ids), **names_in(name)}
