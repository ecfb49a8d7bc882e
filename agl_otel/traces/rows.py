"""Converts JSON rows of the named queries to Span, Reward and events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from agl_otel.spans.rewards import dimensions_of
from agl_otel.traces.attributes import typed
from agl_otel.types import Event, Link, OtelResource, Span, SpanContext, StatusCode, TraceStatus
from agl_otel.types.columns import AttemptKey, Reward, shared
from agl_otel_hook import conventions

_COLUMNS: Final = {
    conventions.LLM_PROMPT_TOKEN_IDS: "PromptTokenIds",
    conventions.LLM_RESPONSE_TOKEN_IDS: "ResponseTokenIds",
    conventions.LLM_RESPONSE_LOGPROBS: "ResponseLogprobs",
}
_STATUS: Final[Mapping[str, StatusCode]] = {"Ok": "OK", "Error": "ERROR"}


def span_of(row: Mapping[str, Any]) -> Span:
    """Convert a row of sql/spans.sql. Token lists that the writer moved into columns become attributes again."""
    types: Mapping[str, str] = row["AttrTypes"]
    attributes = typed(row["SpanAttributes"], types)
    for key, column in _COLUMNS.items():
        if types.get(key) == "column":
            attributes[key] = row[column] if key == conventions.LLM_RESPONSE_LOGPROBS else shared(row[column])
    start = int(row["StartNano"])
    end = start + int(row["Duration"])
    trace, parent = row["TraceId"], row["ParentSpanId"]
    events = zip(row["EventNames"], row["EventNanos"], row["EventAttributes"], strict=True)
    links = zip(row["LinkTraceIds"], row["LinkSpanIds"], row["LinkTraceStates"], row["LinkAttributes"], strict=True)
    return Span.model_validate(
        {
            "rollout_id": row["RolloutId"],
            "attempt_id": row["AttemptId"],
            "sequence_id": int(row["SequenceId"]),
            "trace_id": trace,
            "span_id": row["SpanId"],
            "parent_id": parent or None,
            "name": row["SpanName"],
            "kind": row["SpanKind"],
            "status": TraceStatus(_STATUS.get(row["StatusCode"], "UNSET"), row["StatusMessage"] or None),
            "attributes": attributes,
            "events": [
                Event(name=name, attributes=typed(texts, types, f"event.{n}:"), timestamp=int(nano) / 10**9)
                for n, (name, nano, texts) in enumerate(events)
            ],
            "links": [
                Link(context=_context(*ids), attributes=typed(texts, types, f"link.{n}:") or None) for n, (*ids, texts) in enumerate(links)
            ],
            "resource": OtelResource(attributes=typed(row["ResourceAttributes"], types, "resource:")),
            "start_time": start / 10**9,
            "end_time": end / 10**9,
            "start_time_unix_nano": start,
            "end_time_unix_nano": end,
            "context": _context(trace, row["SpanId"], row["TraceState"]),
            "parent": _context(trace, parent) if parent else None,
            "scope": {"name": row["ScopeName"], "version": row["ScopeVersion"]},
        }
    )


def event_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of sql/events.sql to {trace_id, span_id, event_name, body, attributes}, typed."""
    types: Mapping[str, str] = row["AttrTypes"]
    body = typed({"": row["Body"]}, {"": types["body:"]} if "body:" in types else {})[""]
    ids = {"trace_id": row["TraceId"], "span_id": row["SpanId"]}
    return {**ids, "event_name": row["Event"], "body": body, "attributes": typed(row["LogAttributes"], types)}


def _context(trace_id: str, span_id: str, trace_state: str = "") -> SpanContext:
    """Convert ids and a W3C trace state (comma-separated key=value)."""
    members = (member.strip().partition("=") for member in trace_state.split(",") if member.strip())
    return SpanContext(trace_id=trace_id, span_id=span_id, trace_state={key: value for key, _, value in members})


def rewards_of(rows: Iterable[Mapping[str, Any]]) -> dict[AttemptKey, list[Reward]]:
    """Group the rewards of `tokens.reward_rows` by attempt, in order; the runner's come last, because the last one counts.

    Dimensions without a number are left out.
    """
    rewards: dict[AttemptKey, list[Reward]] = {}
    for row in sorted(rows, key=lambda row: conventions.REWARD_GIVEN in row["Rewards"]):
        for index, name, value in dimensions_of(row["Rewards"]):
            reward = Reward(int(row["SequenceId"]), row["SpanId"], index, name, value)
            rewards.setdefault((row["RolloutId"], row["AttemptId"]), []).append(reward)
    return rewards
