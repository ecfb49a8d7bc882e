"""The late pass over ClickHouse: spans and log records that were stored without ids are copied with the ids that they have by now.

otel_traces is never rewritten: a copy is one more row, with the BatchId, BatchPos and ReceivedAt of the row it copies. Nothing but the
two stores keeps state, and any pass may die anywhere: what is to be copied is what is stored without ids *only*, asked anew each time,
and the insert asks once more. Numbers that a crash left unused are gaps, which are legal. Batches are bounded; so is the memory that
ClickHouse needs, because a pass over everything goes through the traces in parts.

A pass looks at traces of which something was received since `since` (the caller's watermark, with an overlap), or at all of them: that
finds what an outage left behind, and repairs the summary view, which a crash can leave behind its source.

Passes take turns (maintenance.py says how). Should two ever meet, each span is still copied once or, where both insert within the same
moment, read once: readers take one row for each identity.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from agl_otel.collector import faults
from agl_otel.collector.late import Copy, Pending, belongs, numbered, numbers_wanted
from agl_otel.collector.memory import Ids
from agl_otel.errors import UnavailableError
from agl_otel.traces.engine import parameter
from agl_otel.traces.sql import named_query
from agl_otel_hook import conventions

T = TypeVar("T")

TRACES: Final = 200  # looked at together
ROWS: Final = 2_000  # decided and copied together
SHARD_ROWS: Final = 1_000_000  # rows without ids in one part of a pass over everything
ADOPTED: Final = "ro-trace-"
"""What the rollout id of an adopted trace begins with; the trace id follows."""


class Numbers(Protocol):
    """What the late pass needs of the queue."""

    async def take_sequence(self, requests: Sequence[tuple[str, int, int]]) -> list[int]:
        """First numbers for (rollout id, count, at least). Raises UnavailableError while the queue is away."""
        ...


class Traces(Protocol):
    """What the late pass needs of ClickHouse."""

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement that returns nothing."""
        ...

    def read(self, sql: str, format_name: str, params: Mapping[str, str] | None = None) -> bytes:
        """Run a query beside the inserts."""
        ...


class LatePass:
    """Copies what is identified by now. Errors of ClickHouse and UnavailableError of the queue end a pass; the next one goes on."""

    def __init__(self, traces: Traces, numbers: Numbers) -> None:
        self._store = traces
        self._numbers = numbers
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="late")
        self.counts: Counter[str] = Counter()
        """spans and logs that were copied, ever."""

    async def close(self) -> None:
        """Let a pass that runs end after its current query, with UnavailableError, and wait for that."""
        self._closing = True
        await asyncio.to_thread(self._thread.shutdown)

    async def run(self, since_ms: int) -> bool:
        """One pass over the traces of which something was received since then (Unix milliseconds), or over all where it is 0.

        Whether spans are stored without ids at all.
        """
        spans, logs = await self._unidentified("otel_traces"), await self._unidentified("otel_logs")
        for part in await self.parts(since_ms):
            if spans:
                await self._each("late_traces", part, self.copy_spans)
            if logs:
                await self._each("late_log_traces", part, self.copy_logs)
            if not since_ms:
                await self.command("late_refill", {"shards": part["shards"], "shard": part["shard"]})
        return spans

    async def _unidentified(self, table: str) -> bool:
        """Whether the table has rows without ids, other than the steps of training runs: most stores have none, and to ask is cheap."""
        ours, params = ("", {}) if table == "otel_logs" else (" AND SpanName != {train:String}", {"train": _NAMES["train"]})
        return bool(await self.rows(f"SELECT 1 FROM otel.{table} WHERE RolloutId = ''{ours} LIMIT 1", params))

    async def parts(self, since_ms: int) -> list[dict[str, int]]:
        """Parameters of the queries for each part of a pass."""
        shards = 1
        if not since_ms:
            rows = await self.rows("SELECT count() FROM otel.otel_traces WHERE RolloutId = ''", {})
            logs = await self.rows("SELECT count() FROM otel.otel_logs WHERE RolloutId = ''", {})
            shards += max(int(rows[0][0]), int(logs[0][0])) // SHARD_ROWS
        return [{"since": since_ms, "shards": shards, "shard": shard, "limit": TRACES} for shard in range(shards)]

    async def _each(self, name: str, part: Mapping[str, int], copy: Callable[[list[str]], Awaitable[object]]) -> None:
        async for traces in self.traces(name, part):
            await copy(traces)

    async def traces(self, name: str, part: Mapping[str, int]) -> AsyncIterator[list[str]]:
        """The trace ids that the named query lists, some at a time."""
        after = ""
        while found := [str(row[0]) for row in await self.rows(named_query(name), {**part, **names_in(name), "after": after})]:
            yield found
            if len(found) < part["limit"]:
                return
            after = found[-1]

    async def copy_spans(self, traces: Sequence[str], openers: Mapping[str, Ids] = {}) -> None:
        """Copy what belongs to somebody in these traces; `openers` {trace id: ids} says whose a whole trace is."""
        again = True
        while again:  # a batch may end between a parent and its child
            whole, copied = True, 0
            after = ("", "")
            while True:
                params = {"traces": list(traces), "after_trace": after[0], "after_span": after[1], "limit": ROWS}
                rows = [Pending.of(row) for row in await self.rows(named_query("late_spans"), {**params, **names_in("late_spans")})]
                pending = [row._replace(opener=openers.get(row.trace_id, row.opener)) for row in rows]
                copied += await self._copy(belongs(pending))
                if len(rows) < ROWS:
                    break
                whole, after = False, (rows[-1].trace_id, rows[-1].span_id)
            again = copied > 0 and not whole

    async def _copy(self, copies: Sequence[Copy]) -> int:
        if not copies:
            return 0
        wanted = numbers_wanted(copies)
        first = await self._numbers.take_sequence(wanted)
        faults.reach("late-numbered")
        params = {
            "traces": [copy.span.trace_id for copy in copies],
            "spans": [copy.span.span_id for copy in copies],
            "rollouts": [copy.rollout_id for copy in copies],
            "attempts": [copy.attempt_id for copy in copies],
            **names_in("late_copy"),
            "sequences": numbered(copies, {rollout_id: number for (rollout_id, _, _), number in zip(wanted, first, strict=True)}),
        }
        await self.command("late_copy", params)
        faults.reach("late-copied")
        self.counts["spans"] += len(copies)
        return len(copies)

    async def copy_logs(self, traces: Sequence[str]) -> None:
        """Copy the log records of these traces that belong to somebody by now."""
        counting = "SELECT count() FROM otel.otel_logs WHERE RolloutId != '' AND TraceId IN {traces:Array(String)}"
        before = await self.rows(counting, {"traces": list(traces)})
        await self.command("late_log_copy", {"traces": list(traces), **names_in("late_log_copy")})
        after = await self.rows(counting, {"traces": list(traces)})
        self.counts["logs"] += int(after[0][0]) - int(before[0][0])

    async def rows(self, sql: str, params: Mapping[str, object]) -> list[list[Any]]:
        """Ask ClickHouse."""
        texts = {name: parameter(value) for name, value in params.items()}
        body = await self._in_thread(lambda: self._store.read(sql, "JSONCompactEachRow", texts))
        return [json.loads(line) for line in body.splitlines()]

    async def command(self, name: str, params: Mapping[str, object]) -> None:
        """Run a named statement."""
        await self._in_thread(lambda: self._store.command(named_query(name), params))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._closing:
            raise UnavailableError("the late pass was told to stop; the next one goes on")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


_NAMES: Final = {
    "attempt": conventions.SPAN_ATTEMPT,
    "sequence": conventions.SEQUENCE_ID,
    "invalid": conventions.INVALID,
    "adopted": ADOPTED,
    "train": conventions.SPAN_TRAIN_STEP,
}


def names_in(name: str) -> dict[str, str]:
    """The names of the wire that a named query asks for, by parameter."""
    text = named_query(name)
    return {key: value for key, value in _NAMES.items() if f"{{{key}:String}}" in text}
