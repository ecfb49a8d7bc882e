"""The late pass over ClickHouse: copy spans and log records that were stored without ids, with the ids that are known by now.

otel_traces is never rewritten: a copy is one more row, with the BatchId, BatchPos and ReceivedAt of the original. All state is in the two
stores, and a pass may be interrupted anywhere: each pass queries anew which rows are stored *only* without ids, and the insert checks
again. Numbers that a crash left unused are gaps, which are legal. Batches are bounded; so is ClickHouse's memory, because a pass over
everything processes the traces in parts.

A pass reads traces of which something was received since `since` (the caller's watermark, with an overlap), or all of them: that
finds what an outage left behind, and repairs the summary view, which a crash can leave behind its source.

Passes run one at a time (see maintenance.py). Should two overlap, each span is still copied once or, if both insert at the same moment,
read once: readers take one row per identity.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol, TypeVar

from agl_otel.collector import faults
from agl_otel.collector.late import Copy, Pending, identified, number_requests, numbered
from agl_otel.collector.memory import Ids
from agl_otel.errors import UnavailableError
from agl_otel.traces.engine import parameter
from agl_otel.traces.sql import named_query
from agl_otel_hook import conventions

T = TypeVar("T")
_logger = logging.getLogger(__name__)

TRACES: Final = 200  # traces per query
ROWS: Final = 2_000  # rows decided and copied together
SETTLE_MS: Final = 15_000  # age of an evaluation without a trace: exporters send the span of its model call within 5 s of its end
CALL_NS: Final = {"before": 7 * 86_400 * 10**9, "behind": 60 * 10**9}  # times of calls, relative to their evaluation's
REMEMBERED: Final = 100_000  # ambiguous evaluations; beyond that they may be counted again
SHARD_ROWS: Final = 1_000_000  # rows without ids in one part of a pass over everything
ADOPTED: Final = "ro-trace-"
"""Prefix of an adopted trace's rollout id; the trace id follows."""
CONVERSATION: Final = "ro-conversation-"
"""Prefix of the rollout id of adopted traces with a conversation id; a hash of that follows."""


class Numbers(Protocol):
    """The queue, as the late pass uses it."""

    async def take_sequence(self, requests: Sequence[tuple[str, int, int]]) -> list[int]:
        """Reserve numbers for each (rollout id, count, at least); return the first ones. Raises UnavailableError."""
        ...


class Traces(Protocol):
    """ClickHouse, as the late pass uses it."""

    def command(self, sql: str, params: Mapping[str, object] | None = None) -> None:
        """Run a statement that returns nothing."""
        ...

    def read(self, sql: str, format_name: str, params: Mapping[str, str] | None = None) -> bytes:
        """Run a query concurrently with inserts."""
        ...


class LatePass:
    """Copies rows that are identified by now. Errors of ClickHouse and UnavailableError of the queue end a pass; the next one continues."""

    def __init__(self, traces: Traces, numbers: Numbers) -> None:
        self._store = traces
        self._numbers = numbers
        self._closing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="late")
        self._settled_ms = 0
        self._logs = False
        self._ambiguous: set[tuple[int, int]] = set()
        self.counts: Counter[str] = Counter()
        """Since the start: spans and logs copied, and ambiguous evaluations, whose response is of several attempts' calls."""

    async def close(self) -> None:
        """End a running pass after its current query, with UnavailableError, and wait for that."""
        self._closing = True
        await asyncio.to_thread(self._thread.shutdown)

    async def run(self, since_ms: int, now_ms: int) -> bool:
        """Run a pass over the traces of which something was received since `since_ms` (Unix milliseconds), or over all if it is 0.

        Returns whether any spans are stored without ids.
        """
        spans, logs = await self._unidentified("otel_traces"), await self._unidentified("otel_logs")
        self._logs, self._settled_ms = logs, now_ms - SETTLE_MS
        for part in await self.parts(since_ms):
            if spans:
                await self._each("late_traces", part, self.copy_spans)
            if logs:
                await self._each("late_log_traces", part, self.copy_logs)
            if not since_ms:
                await self.command("late_refill", {"shards": part["shards"], "shard": part["shard"]})
        if logs:
            await self._each_evaluation({"since": since_ms})
        return spans

    async def _unidentified(self, table: str) -> bool:
        """Return whether the table has rows without ids, besides training runs: a cheap check, and most stores have none."""
        ours, params = ("", {}) if table == "otel_logs" else (" AND NOT startsWith(SpanName, {train:String})", {"train": _NAMES["train"]})
        return bool(await self.rows(f"SELECT 1 FROM otel.{table} WHERE RolloutId = ''{ours} LIMIT 1", params))

    async def parts(self, since_ms: int) -> list[dict[str, int]]:
        """Return the query parameters for each part of a pass."""
        shards = 1
        if not since_ms:
            rows = await self.rows("SELECT count() FROM otel.otel_traces WHERE RolloutId = ''", {})
            logs = await self.rows("SELECT count() FROM otel.otel_logs WHERE RolloutId = ''", {})
            shards += max(int(rows[0][0]), int(logs[0][0])) // SHARD_ROWS
        return [{"since": since_ms, "shards": shards, "shard": shard, "limit": TRACES} for shard in range(shards)]

    async def _each_evaluation(self, part: Mapping[str, object]) -> None:
        asked = {"traces": [], "settled": self._settled_ms, "limit": ROWS, **part}
        await self._each("late_evaluations", asked, self._copy_evaluations)

    async def _each(self, name: str, part: Mapping[str, Any], copy: Callable[[list[str]], Awaitable[object]]) -> None:
        async for traces in self.traces(name, part):
            await copy(traces)

    async def traces(self, name: str, part: Mapping[str, Any]) -> AsyncIterator[list[str]]:
        """Yield pages of the trace ids, or responses, that the named query lists."""
        after = ""
        while found := [str(row[0]) for row in await self.rows(named_query(name), {**part, **names_in(name), "after": after})]:
            yield found
            if len(found) < part["limit"]:
                return
            after = found[-1]

    async def copy_spans(self, traces: Sequence[str], openers: Mapping[str, Ids] = {}) -> None:
        """Copy the spans of these traces that can be identified; `openers` {trace id: ids} assigns whole traces."""
        again = True
        while again:  # a batch may end between a parent and its child
            whole, copied = True, 0
            after = ("", "")
            while True:
                params = {"traces": list(traces), "after_trace": after[0], "after_span": after[1], "limit": ROWS}
                rows = [Pending.of(row) for row in await self.rows(named_query("late_spans"), {**params, **names_in("late_spans")})]
                pending = [row._replace(opener=openers.get(row.trace_id, row.opener)) for row in rows]
                copied += await self._copy(identified(pending))
                if len(rows) < ROWS:
                    break
                whole, after = False, (rows[-1].trace_id, rows[-1].span_id)
            again = copied > 0 and not whole

    async def _copy(self, copies: Sequence[Copy]) -> int:
        if not copies:
            return 0
        requests = number_requests(copies)
        first = await self._numbers.take_sequence(requests)
        faults.failpoint("late-numbered")
        params = {
            "traces": [copy.span.trace_id for copy in copies],
            "spans": [copy.span.span_id for copy in copies],
            "rollouts": [copy.rollout_id for copy in copies],
            "attempts": [copy.attempt_id for copy in copies],
            **names_in("late_copy"),
            "sequences": numbered(copies, {rollout_id: number for (rollout_id, _, _), number in zip(requests, first, strict=True)}),
        }
        await self.command("late_copy", params)
        faults.failpoint("late-copied")
        self.counts["spans"] += len(copies)
        if self._logs:  # evaluations of these spans, however old
            await self._each_evaluation({"since": self._settled_ms + 1, "traces": list(dict.fromkeys(params["traces"]))})
        return len(copies)

    async def copy_logs(self, traces: Sequence[str]) -> None:
        """Copy the log records of these traces that can be identified by now."""
        counting = "SELECT count() FROM otel.otel_logs WHERE RolloutId != '' AND TraceId IN {traces:Array(String)}"
        before = await self.rows(counting, {"traces": list(traces)})
        await self.command("late_log_copy", {"traces": list(traces), **names_in("late_log_copy")})
        after = await self.rows(counting, {"traces": list(traces)})
        self.counts["logs"] += int(after[0][0]) - int(before[0][0])

    async def _copy_evaluations(self, responses: Sequence[str]) -> None:
        """Copy evaluations of no trace that name these responses to the attempt of their model call.

        Only calls at most CALL_NS around an evaluation are candidates: model servers that count their responses repeat the ids. If the
        latest has no ids yet, the evaluation waits; if several attempts have candidates, it is ambiguous and left.
        """
        asked = {"responses": list(responses), "settled": self._settled_ms, **CALL_NS, **names_in("late_responses")}
        found = await self.rows(named_query("late_responses"), asked)
        self._report_ambiguous([(response, int(time)) for response, time, _, attempts in found if int(attempts) > 1])
        given = [(response, int(time), *ids) for response, time, ids, attempts in found if int(attempts) == 1 and ids[0]]
        if not given:
            return
        columns = dict(zip(("responses", "times", "rollouts", "attempts"), map(list, zip(*given, strict=True)), strict=True))
        counting = "SELECT count() FROM otel.otel_logs WHERE RolloutId IN {rollouts:Array(String)} AND TraceId = ''"
        before = await self.rows(counting, {"rollouts": columns["rollouts"]})
        await self.command("late_evaluation_copy", {**columns, **names_in("late_evaluation_copy")})
        after = await self.rows(counting, {"rollouts": columns["rollouts"]})
        self.counts["logs"] += int(after[0][0]) - int(before[0][0])

    def _report_ambiguous(self, evaluations: Sequence[tuple[str, int]]) -> None:
        """Count the evaluations that were not counted before; log the first."""
        new = {(hash(response), time) for response, time in evaluations} - self._ambiguous
        if not new:
            return
        if not self.counts["ambiguous"]:
            _logger.warning(
                "an evaluation gets no ids: calls of several attempts have its response, %.100r, within seven days. Evaluators must name "
                "the trace or agentlightning.rollout_id. Further ones are only counted (ambiguous_evaluations)",
                evaluations[0][0],
            )
        self.counts["ambiguous"] += len(new)
        self._ambiguous = self._ambiguous | new if len(self._ambiguous) < REMEMBERED else new

    async def rows(self, sql: str, params: Mapping[str, object]) -> list[list[Any]]:
        """Run a query and return its rows."""
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
    "conversation": CONVERSATION,
    "response": conventions.RESPONSE_ID,
    "reward_response": conventions.reward_response_key(0),
    "train": f"{conventions.TRAIN}.",
}


def names_in(name: str) -> dict[str, str]:
    """Return the wire names that a named query uses, by parameter."""
    text = named_query(name)
    return {key: value for key, value in _NAMES.items() if f"{{{key}:String}}" in text}
