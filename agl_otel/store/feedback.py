"""The part of the store for feedback: rewards, texts and corrections that come after the fact.

Feedback is a log record `gen_ai.evaluation.result`, as an evaluator of OpenTelemetry's sends it, so that every reader of rewards has it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from agl_otel.errors import NotFoundError
from agl_otel.spans.feedback import stored_evaluation
from agl_otel.store.connections import Connected, Connection
from agl_otel.store.figures import text_attributes
from agl_otel.store.otlp import id_bytes, unix_nano
from agl_otel.traces.names import names_in
from agl_otel.traces.sql import named_query
from agl_otel.types.feedback import Feedback, GivenFeedback, StoredEvaluation
from agl_otel.types.scores import AGENT, RUNNER
from agl_otel_hook import conventions

SCOPE: Final = "agl_otel.feedback"


class _Place(NamedTuple):
    """What feedback is about, as far as it is known."""

    rollout_id: str = ""
    attempt_id: str = ""
    trace_id: str = ""


class Answered(NamedTuple):
    """A conversation, and who answered it."""

    conversation: str
    """Its rollout's id, or its trace's while that has none."""
    rollout_id: str
    """Or empty."""
    arms: dict[str, float]
    """{resource name of an LLM that answered, or that could not as a canary: when it was asked first, in Unix seconds}."""
    began: float
    """Its first call, in Unix seconds."""
    latest: float
    """Its last call's begin."""
    full: list[str]
    """The canaries that did not take it because they had taken as many conversations as they may, as NAME@VERSION of the set."""


class Feedbacks(Connected):
    """Feedback on attempts, conversations and model calls."""

    async def add_reward(self, value: float | bool | None = None, **fields: Any) -> GivenFeedback:
        """Store a reward for `rollout_id` (and `attempt_id`), `conversation_id` or `response_id`, which may have ended long ago.

        `fields` are those of Feedback: `label`, `text`, `correction`, `name`, `source`, `rubric`, `time`, `id`. It is readable when this
        returns. Raises UsageError for wrong fields, and what `add_feedback` raises.
        """
        return await self.add_feedback(Feedback.of({"value": value, **fields}, "the feedback"))

    async def rewarded(self, rollout_ids: Sequence[str], sources: Collection[str] | None = None) -> set[str]:
        """Return those of the rollouts that have a reward of one of `sources` (Reward.source; None: of any) by now, without a barrier."""
        connection = await self._open()
        asked = {"rollouts": list(rollout_ids), "sources": sorted(sources or ()), "runner": RUNNER, "agent": AGENT}
        rows = await connection.reader.query(named_query("rewarded"), params={**names_in("rewarded"), **asked})
        return {row["RolloutId"] for row in rows}

    async def arms(self, since: float) -> list[Answered]:
        """Return the conversations that went on after a time (Unix seconds), and who answered them then and the day before.

        Calls by a set of resources with a canary, and by AGL_UPSTREAM_RESOURCES, say which LLM answered, and spans of products by whose
        prompts.
        """
        params = {"since": int(since * 1e9), **names_in("arms")}
        rows = await (await self._open()).reader.query(named_query("arms"), params=params)
        return [
            Answered(
                conversation=row["Conversation"],
                rollout_id=row["RolloutId"],
                arms={name: first / 1e9 for name, first in zip(row["Arms"], row["ArmNanos"], strict=True)},
                began=row["Began"] / 1e9,
                latest=row["Latest"] / 1e9,
                full=list(row["Full"]),
            )
            for row in rows
        ]

    async def evaluations(self, rollout_id: str) -> list[StoredEvaluation]:
        """Return the evaluations of a rollout that came as log records, feedback among them, by attempt and time, without a barrier."""
        return [stored_evaluation(record) for record in await (await self._open()).reader.evaluations([rollout_id])]

    async def add_feedback(self, feedback: Feedback) -> GivenFeedback:
        """Store feedback, as `add_reward` does.

        Raises NotFoundError if the rollout or attempt does not exist, or no span of the conversation is stored; UnavailableError.
        """
        connection = await self._open()
        place = await _place_of(connection, feedback)
        if "id" in feedback.model_fields_set:  # else nobody has its id yet
            ids = {"id": feedback.id, "rollout_id": place.rollout_id, "attempt_id": place.attempt_id}
            if known := await connection.reader.query(named_query("feedback"), params={**ids, **names_in("feedback")}):
                found = {"rollout_id": known[0]["RolloutId"] or None, "attempt_id": known[0]["AttemptId"] or None}
                return GivenFeedback(id=feedback.id, **found, is_new=False)
        feedback.model_fields_set.add("id")  # when it is sent again, it may be stored
        await connection.writer.write_logs(_request(feedback, place))
        return GivenFeedback(id=feedback.id, rollout_id=place.rollout_id or None, attempt_id=place.attempt_id or None)


async def _place_of(connection: Connection, feedback: Feedback) -> _Place:
    if feedback.rollout_id is not None:
        return _Place(feedback.rollout_id, await _attempt_of(connection, feedback.rollout_id, feedback.attempt_id))
    if feedback.conversation_id is not None:
        await connection.reader.barrier()
        rows = await connection.reader.query(named_query("conversation"), params={"conversation": feedback.conversation_id})
        if not rows:
            raise NotFoundError(f"no span of conversation {feedback.conversation_id!r} is stored (yet): send the feedback again later")
        (latest,) = rows
        if latest["RolloutId"]:
            return _Place(latest["RolloutId"], latest["AttemptId"])
        return _Place(trace_id=latest["TraceId"])  # the late pass finds the trace's rollout
    return _Place()  # the late pass finds the response's call


async def _attempt_of(connection: Connection, rollout_id: str, attempt_id: str | None) -> str:
    attempts = [each.attempt_id for each in await connection.queue.query_attempts([rollout_id])]
    if not attempts or (attempt_id is not None and attempt_id not in attempts):
        what = "no attempt" if attempt_id is None else f"no attempt {attempt_id}"
        raise NotFoundError(f"rollout {rollout_id} has {what}, or does not exist")
    return attempts[-1] if attempt_id is None else attempt_id


def _request(feedback: Feedback, place: _Place) -> bytes:
    """Serialise feedback as an ExportLogsServiceRequest with one record."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
    from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs

    now = time.time_ns()
    texts = {
        conventions.ROLLOUT_ID: place.rollout_id,
        conventions.ATTEMPT_ID: place.attempt_id,
        conventions.EVALUATION_NAME: feedback.name,
        conventions.EVALUATION_LABEL: feedback.label,
        conventions.EVALUATION_TEXT: feedback.text,
        conventions.RESPONSE_ID: feedback.response_id,
        conventions.CONVERSATION_ID: feedback.conversation_id,
        conventions.FEEDBACK_ID: feedback.id,
        conventions.FEEDBACK_SOURCE: feedback.source,
        conventions.FEEDBACK_RUBRIC: feedback.rubric,
        conventions.FEEDBACK_CORRECTION: feedback.correction,
        conventions.FEEDBACK_STORED: "" if feedback.time is None else datetime.fromtimestamp(now / 1e9, UTC).isoformat(timespec="seconds"),
    }
    attributes = text_attributes({name: text for name, text in texts.items() if text})
    if feedback.value is not None:
        attributes.append(KeyValue(key=conventions.EVALUATION_SCORE, value=AnyValue(double_value=float(feedback.value))))
    record = LogRecord(
        time_unix_nano=now if feedback.time is None else unix_nano(feedback.time),
        observed_time_unix_nano=now,
        event_name=conventions.EVALUATION,
        attributes=attributes,
        trace_id=id_bytes(place.trace_id, 16, "trace id") if place.trace_id else b"",
    )
    scope = ScopeLogs(scope=InstrumentationScope(name=SCOPE), log_records=[record])
    return ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[scope])]).SerializeToString()
