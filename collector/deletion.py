"""Delete rollouts from ClickHouse: spans, log records, metrics, sums (orphans.py). The queue deletes them first; this is the second half.

Rows without ids that were copied to a rollout later (late_pass.py) are deleted with it. They are found by its copies, so they are deleted
before these: an interrupted deletion is finished by repeating the request. Data that arrives for a rollout afterwards is stored.
Deleted rows are invisible to queries at once (ClickHouse's lightweight DELETE, awaited); `purge` clears them from
the files.

As with maintenance.py, the process that has the engine open does the work: the collector for the embedded one (`POST /delete`, body
{"rollouts": [ids]}; an empty list asks whether deletion is possible), `agl-otel` itself for a server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, Final

from aiohttp import web

from agl_otel.collector import orphans
from agl_otel.errors import UnavailableError, UsageError
from agl_otel.net.bodies import json_of
from agl_otel.traces.cluster import on_cluster, on_every_node, stored_as
from agl_otel.traces.engine import Engine
from agl_otel.traces.sql import named_query

PURGE_SECONDS: Final = 240.0  # once woken, ClickHouse removes old files within seconds, unless they are being read
SOURCES: Final = 1_000  # rows without ids per statement
TABLES: Final = (
    "otel_metrics_gauge",
    "otel_metrics_sum",
    "otel_metrics_histogram",
    "otel_metrics_exponential_histogram",
    "otel_metrics_summary",
    "otel_logs",
    "rollout_summary_states",
    "otel_traces",  # last, because its rows identify the rows without ids that belong to a rollout
)
"""Every table keyed by rollout."""
TRACE_TIMES: Final = "otel_traces_trace_id_ts"
PURGED: Final = (*TABLES, orphans.SERVICES.table, TRACE_TIMES)
"""Every table from which rows are deleted with a rollout."""
_TO_PURGE: Final = (
    "SELECT DISTINCT table FROM system.parts WHERE database = 'otel' AND table IN {tables:Array(String)} AND active "
    "AND has_lightweight_delete UNION DISTINCT SELECT table FROM system.mutations WHERE database = 'otel' "
    "AND table IN {tables:Array(String)} AND position(command, 'DELETED MASK') = 0"
)
"""Tables with deleted rows, or with stored texts of deletions."""
_OLD_PARTS: Final = (
    "SELECT table, name FROM system.parts WHERE database = 'otel' AND table IN {tables:Array(String)} AND NOT active UNION ALL "
    "SELECT table, max(mutation_id) FROM system.mutations WHERE database = 'otel' AND table IN {tables:Array(String)} GROUP BY table "
    "HAVING count() > 1 LIMIT 1"
)
_UNFINISHED: Final = (
    "SELECT DISTINCT name FROM system.tables WHERE database = 'otel' AND name IN {tables:Array(String)} "
    "AND position(engine_full, 'old_parts_lifetime') > 0"
)
"""Tables on which a killed purge left its settings: they keep no sources of merges, which a full disk may make necessary."""
_SAME_SPAN: Final = (
    "RolloutId = '' AND TraceId IN arrayDistinct({traces:Array(String)}) "
    "AND (TraceId, SpanId) IN arrayZip({traces:Array(String)}, {spans:Array(String)})"
)
_SAME_LOG: Final = (
    "RolloutId = '' AND (BatchId, BatchPos, "
    "cityHash64(TraceId, SpanId, Timestamp, SeverityText, EventName, Body, toString(LogAttributes))) "
    "IN arrayZip({batches:Array(UInt64)}, {places:Array(UInt32)}, {hashes:Array(UInt64)})"
)
_OF_ROLLOUTS: Final = "RolloutId IN {rollouts:Array(String)}"
_OF_TRACES: Final = "TraceId IN {traces:Array(String)}"
_SOON: Final = {"old_parts_lifetime": 0, "finished_mutations_to_keep": 1}
"""Table settings for a purge: old files are removed at once, and so are the texts of the last hundred deletions (a file for each)."""
_EVERYWHERE: Final = f"mutations_sync = 2, distributed_ddl_output_mode = 'none', distributed_ddl_task_timeout = {PURGE_SECONDS:.0f}"
"""Settings for a statement that returns when every replica and every node has run it; an unreachable one is an error."""


class Deletion:
    """Deletes through one engine, one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = asyncio.Lock()

    async def run(self, rollout_ids: Sequence[str]) -> dict[str, int]:
        """Delete the data of these rollouts; return the numbers of deleted rows with ids, by table, if any.

        Raises UnavailableError or ClickHouseError if ClickHouse cannot do it now; repeating the request then finishes the work.
        """
        async with self._turn:
            return await asyncio.to_thread(self._run, sorted({name for name in rollout_ids if name}))

    async def purge(self) -> None:
        """Clear deleted rows from the disk: when this returns, no file of ClickHouse holds one.

        Every part with deleted rows is rewritten, and the old parts are removed; none, if nothing was deleted. Raises UnavailableError if
        that takes too long (a query reads them), ClickHouseError if it fails; it may be repeated then.
        """
        async with self._turn:
            await asyncio.to_thread(self._purge)

    def _purge(self) -> None:
        cluster, run = self._engine.cluster, self._engine.command
        stored = [stored_as(table, cluster) for table in PURGED]
        on, rows = on_cluster(cluster), self._engine.select(on_every_node(_TO_PURGE, cluster), {"tables": stored})
        tables = [table for table in stored if [table] in rows]
        unfinished = [str(row[0]) for row in self._engine.select(on_every_node(_UNFINISHED, cluster), {"tables": stored})]
        soon = ", ".join(f"{name} = {value}" for name, value in _SOON.items())
        for table in tables:
            run(f"ALTER TABLE otel.{table}{on} MODIFY SETTING {soon}")
        try:
            for table in tables:
                run(f"ALTER TABLE otel.{table}{on} APPLY DELETED MASK SETTINGS {_EVERYWHERE}")
            deadline = time.monotonic() + PURGE_SECONDS
            while tables and (old := self._engine.select(on_every_node(_OLD_PARTS, cluster), {"tables": tables})):
                if time.monotonic() > deadline:
                    raise UnavailableError(f"ClickHouse still keeps old files ({old[0][0]}, {old[0][1]}): try again")
                for table in tables:  # wake the removal thread, which otherwise sleeps for up to five minutes
                    run(f"SYSTEM START CLEANUP{on} otel.{table}")
                time.sleep(0.5)
        finally:
            for table in {*tables, *unfinished}:
                run(f"ALTER TABLE otel.{table}{on} RESET SETTING {', '.join(_SOON)}")

    def _run(self, ids: list[str]) -> dict[str, int]:
        params = {"rollouts": ids}
        if not ids:
            self._engine.select("SELECT 1")
            return {}
        while rows := self._engine.select(named_query("delete_sources"), {**params, "limit": SOURCES}):
            traces, spans = ([row[place] for row in rows] for place in (0, 1))
            self._engine.delete("otel_traces", _SAME_SPAN, {"traces": traces, "spans": spans})
        while rows := self._engine.select(named_query("delete_log_sources"), {**params, "limit": SOURCES}):
            batches, places, hashes = ([row[place] for row in rows] for place in (0, 1, 2))
            self._engine.delete("otel_logs", _SAME_LOG, {"batches": batches, "places": places, "hashes": hashes})
        removed: dict[str, int] = {}
        traces: list[object] = []
        for table in TABLES:
            if table == TABLES[-1]:
                traces = self._forget_traces(ids)
            if count := self._remove(table, params):
                removed[table] = count
        self._remove(TRACE_TIMES, params)
        refill = named_query("refill_trace_id_ts")  # a span that arrived meanwhile is found by its trace
        self._engine.command(refill.replace(orphans.ONE_BATCH, _OF_ROLLOUTS), params)
        for start in range(0, len(traces), SOURCES):
            self._engine.command(refill.replace(orphans.ONE_BATCH, _OF_TRACES), {"traces": traces[start : start + SOURCES]})
        orphans.forget(self._engine, [orphans.SERVICES])
        return removed

    def _remove(self, table: str, of_rollouts: dict[str, list[str]]) -> int:
        """Delete the matching rows and return their number; without a match no part is written."""
        [[count]] = self._engine.select(f"SELECT count() FROM otel.{table} WHERE {_OF_ROLLOUTS}", of_rollouts)
        if count:
            self._engine.delete(table, _OF_ROLLOUTS, of_rollouts)
        return int(str(count))

    def _forget_traces(self, ids: list[str]) -> list[object]:
        """Delete the times of traces that belong to these rollouts, while their spans still name them; return those traces."""
        traces: list[object] = []
        after: object = ""
        while rows := self._engine.select(named_query("delete_traces"), {"rollouts": ids, "after": after, "limit": SOURCES}):
            self._engine.delete(TRACE_TIMES, _OF_TRACES, {"traces": [row[0] for row in rows]})
            after = rows[-1][0]
            traces += [row[0] for row in rows]
        return traces

    async def handle(self, request: web.Request) -> web.Response:
        """POST /delete."""
        try:
            body: Any = await json_of(request)
            ids: Any = body["rollouts"]
        except (ValueError, TypeError, KeyError, json.JSONDecodeError):
            ids = None
        if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):  # pyright: ignore[reportUnknownVariableType] - JSON
            raise UsageError('POST /delete takes {"rollouts": [rollout ids]}')
        return web.json_response({"removed": await self.run(ids)})  # pyright: ignore[reportUnknownArgumentType] - checked above
