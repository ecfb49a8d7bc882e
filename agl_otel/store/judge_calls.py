"""The part of the store for what judges spend: a log record before each call, with the most that it may take, and one after it.

So the spend of all runs of a judge is known, also of those that were killed: their calls in flight count as the most.
"""

from __future__ import annotations

import time
from typing import Final

from agl_otel.store.connections import Connected
from agl_otel.store.figures import text_attributes
from agl_otel.traces.names import names_in
from agl_otel.traces.sql import named_query
from agl_otel.types.reviews import Took
from agl_otel_hook import conventions

SCOPE: Final = "agl_otel.judge"


class JudgeCalls(Connected):
    """What the calls of judges took."""

    async def judge_spend(self, source: str, rubric: str) -> Took:
        """Return what all runs of a judge (`judge:MODEL`) under a version of a rubric took."""
        reader = (await self._open()).reader
        await reader.barrier()
        given = {"judge": source, "rubric": rubric}
        (row,) = await reader.query(named_query("judge_spend"), params={**names_in("judge_spend"), **given})
        return Took(*(int(row[name]) for name in ("Calls", "PromptTokens", "AnswerTokens")))

    async def add_judge_call(self, source: str, rubric: str, call: str, tokens: tuple[int, int], *, ended: bool) -> None:
        """Store the (prompt, answer) tokens of a call: what it may take at most, or once it has `ended`, what it took.

        Raises UnavailableError.
        """
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
        from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs

        now = time.time_ns()
        texts = {
            conventions.FEEDBACK_SOURCE: source,
            conventions.FEEDBACK_RUBRIC: rubric,
            conventions.JUDGE_CALL: call,
            conventions.JUDGE_PROMPT_TOKENS: str(tokens[0]),
            conventions.JUDGE_ANSWER_TOKENS: str(tokens[1]),
            **({conventions.JUDGE_ENDED: "true"} if ended else {}),
        }
        event = conventions.JUDGE_EVENT
        record = LogRecord(time_unix_nano=now, observed_time_unix_nano=now, event_name=event, attributes=text_attributes(texts))
        scope = ScopeLogs(scope=InstrumentationScope(name=SCOPE), log_records=[record])
        request = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[scope])]).SerializeToString()
        await (await self._open()).writer.write_logs(request)
