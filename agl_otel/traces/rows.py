"""Converts JSON rows of the named queries to Span, Reward and events."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

from agl_otel.spans.rewards import dimensions_of, place_of, unread_of
from agl_otel.spans.tolerant import whole_of
from agl_otel.traces.attributes import typed
from agl_otel.types import Event, Link, OtelResource, Span, SpanContext, StatusCode, TraceStatus
from agl_otel.types.columns import AttemptKey, Reward, shared
from agl_otel.types.scores import AGENT, RUNNER
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
                Event(name=name, attributes=typed(texts, types, f"event.{n}:"), timestamp=int(nano) / 10**9, time_unix_nano=int(nano))
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


def evaluation_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a row of sql/evaluations.sql to {rollout_id, attempt_id, trace_id, span_id, response_id, event: Event, row}."""
    attributes = typed(row["LogAttributes"], row["AttrTypes"])
    ids = {"rollout_id": row["RolloutId"], "attempt_id": row["AttemptId"], "trace_id": row["TraceId"], "span_id": row["SpanId"]}
    time = int(row["Time"])
    event = Event(name=conventions.EVALUATION, attributes=attributes, timestamp=time / 10**9, time_unix_nano=time, is_record=True)
    return {**ids, "response_id": row["Rewards"].get(conventions.reward_response_key(0), ""), "event": event, "row": row}


def _context(trace_id: str, span_id: str, trace_state: str = "") -> SpanContext:
    """Convert ids and a W3C trace state (comma-separated key=value)."""
    members = (member.strip().partition("=") for member in trace_state.split(",") if member.strip())
    return SpanContext(trace_id=trace_id, span_id=span_id, trace_state={key: value for key, _, value in members})


def rewards_of(rows: Iterable[Mapping[str, Any]]) -> dict[AttemptKey, list[Reward]]:
    """Group the rewards of `tokens.reward_rows` by attempt, in order: the last one counts.

    An evaluation comes after the rewards that began by its time, because records have no place in the sequence of spans. The runner's come
    last. Dimensions without a number are left out; one that is not usable (types/scores.py) stays, since no earlier one counts instead.
    """
    emitted: dict[AttemptKey, list[tuple[int, list[Reward]]]] = {}
    evaluations: dict[AttemptKey, list[Reward]] = {}
    given: dict[AttemptKey, list[Reward]] = {}
    for row in rows:
        key, found = (row["RolloutId"], row["AttemptId"]), _rewards_in(row)
        if conventions.reward_time_key(0) in row["Rewards"]:
            evaluations.setdefault(key, []).extend(found)
        elif conventions.REWARD_GIVEN in row["Rewards"]:
            given.setdefault(key, []).extend(replace(each, source=RUNNER) for each in found)
        elif found:
            emitted.setdefault(key, []).append((int(row["Time"]), found))
    ordered = {key: sorted(found, key=lambda each: place_of(each.time or 0, each.name, each.value)) for key, found in evaluations.items()}
    rewards = {key: _placed(emitted.get(key, []), ordered.get(key, [])) + given.get(key, []) for key in emitted | ordered | given}
    return {key: found for key, found in rewards.items() if found}


def unread_labels(rows: Iterable[Mapping[str, Any]]) -> dict[AttemptKey, Counter[str]]:
    """Count the evaluations of each attempt in the same rows that have no score, and a label that stands for no number."""
    found: dict[AttemptKey, Counter[str]] = {}
    for row in rows:
        for label in unread_of(row["Rewards"]):
            found.setdefault((row["RolloutId"], row["AttemptId"]), Counter())[label] += 1
    return found


def _rewards_in(row: Mapping[str, Any]) -> list[Reward]:
    rewards: Mapping[str, str] = row["Rewards"]
    sequence, span_id = int(row["SequenceId"]), row["Evaluated"] or row["SpanId"]
    found: list[Reward] = []
    for index, name, value in dimensions_of(rewards):
        time = rewards.get(conventions.reward_time_key(index))
        if time is None:
            found.append(Reward(sequence, span_id, index, name, value))
        else:
            response = rewards.get(conventions.reward_response_key(index), "")
            source = rewards.get(conventions.reward_source_key(index), AGENT)
            found.append(Reward(sequence, span_id, 0, name, value, whole_of(time), response, source))
    return found


def _placed(emitted: Sequence[tuple[int, list[Reward]]], evaluations: Iterable[Reward]) -> list[Reward]:
    """Return the emitted rewards [(time, rewards of one span)] in their order, each evaluation after the last that is not later than it.

    Both are in order.
    """
    after: list[list[Reward]] = [[] for _ in range(len(emitted) + 1)]
    earliest = [*accumulate((time for time, _ in reversed(emitted)), min)][::-1]  # of each and those after it
    for evaluation in evaluations:
        after[bisect_right(earliest, evaluation.time or 0)].append(evaluation)
    return [*after[0], *(each for (_, own), later in zip(emitted, after[1:], strict=True) for each in (*own, *later))]
