"""What failed in an attempt, in a line that is the same for attempts that failed alike: the clusters of failures. Pure.

Texts in it are without secrets, and numbers, ids, paths and quotations in them are marks, so that two tries at one error are one cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from agl_otel.adapters.chats import conversations
from agl_otel.adapters.messages import to_messages
from agl_otel.adapters.near import leaders, shingles
from agl_otel.spans.operations import OPERATION, TOOL_LIKE
from agl_otel.spans.tolerant import MALFORMED
from agl_otel.text import printable, without_secrets
from agl_otel.types import TAKEN_VERDICTS, Attempt, RolloutStatus, Span, VerdictKind
from agl_otel_hook import conventions

K = TypeVar("K", bound=Hashable)
LONGEST: Final = 120
"""Characters of a cluster's name."""
REPLY: Final = "reply: "
"""How the name of a cluster of replies begins."""
NEAR_REPLIES: Final = 0.5
"""The similarity of replies that are one cluster."""
_FINISHED: Final = frozenset({"", "stop", "end_turn", "stop_sequence"})
_TOOL_NAMES: Final = ("gen_ai.tool.name", "tool.name")
_MARKS: Final = (
    (re.compile(r"(?<!\w)(['\"`])(?:(?!\1).){1,500}?\1(?!\w)"), "<text>"),
    (re.compile(r"\b[a-z][a-z+.-]*://\S+"), "<url>"),
    (re.compile(r"(?<![\w<])/[\w.-]+(?:/[\w.-]+)+"), "<path>"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b|\b(?=[\w-]*\d)(?=[\w-]*[a-zA-Z_])[\w-]{8,}\b"), "<id>"),
    (re.compile(r"\d+(?:[.,:]\d+)*"), "<n>"),
    (re.compile(r"\s+"), " "),
)


class _Failed(NamedTuple):
    """An error of a span."""

    span: Span
    what: str
    time: float


def has_failed(status: RolloutStatus, verdict: VerdictKind, reward: float | None, below: float | None) -> bool:
    """Whether an attempt failed: it did not succeed, training does not take its verdict, or its reward is less than `below`."""
    return status != "succeeded" or verdict not in TAKEN_VERDICTS or (reward is not None and below is not None and reward < below)


def what_failed(spans: Sequence[Span], attempt: Attempt, verdict: VerdictKind) -> str:
    """Return what failed in an attempt; a text that begins with REPLY if only its last reply may tell, which is then the whole reply.

    In this order: that it took too long; the last error of its spans, with the tool in which it came up; the error with which the runner
    ended it; why its last reply was cut off; a verdict that training does not take; the reply.
    """
    if attempt.status in ("timeout", "unresponsive"):
        return attempt.status
    if error := _last_error(spans):
        return _cut(error)
    if attempt.status != "succeeded" and attempt.error:
        return _cut(f"{attempt.status}: {normal(attempt.error)}")
    if (reason := _last_finish_reason(spans)) not in _FINISHED:
        return f"finish reason: {reason}"
    if verdict not in TAKEN_VERDICTS:
        return f"verdict: {verdict}"
    return REPLY + _last_reply(spans)


def named(failures: Mapping[K, str]) -> dict[K, str]:
    """Return {attempt: name of its cluster} for what `what_failed` found; replies are one cluster where they are alike."""
    replies = [key for key, found in failures.items() if found.startswith(REPLY)]
    texts = [normal(failures[key].removeprefix(REPLY)) for key in replies]
    first = leaders([shingles(text) for text in texts], NEAR_REPLIES)
    clusters = {key: _cut(REPLY + (texts[place] or "none")) for key, place in zip(replies, first, strict=True)}
    return {key: clusters.get(key, found) for key, found in failures.items()}


def normal(text: str) -> str:
    """Return the first line of a message, with marks in place of what differs between two tries, and without secrets."""
    line = next((line for line in str(without_secrets(text)).splitlines() if line.strip()), "")
    for pattern, mark in _MARKS:
        line = pattern.sub(mark, line)
    return printable(line.strip())


def _last_error(spans: Sequence[Span]) -> str:
    failed = [_Failed(span, *found) for span in spans for found in _errors(span)]
    if not failed:
        return ""
    last = max(failed, key=lambda each: each.time)
    origin = min((each for each in failed if each.what == last.what), key=lambda each: each.time)
    tool = _tool(origin.span, {span.span_id: span for span in spans})
    return f"tool {tool}: {last.what}" if tool else last.what


def _errors(span: Span) -> Iterator[tuple[str, float]]:
    """Yield each error of a span: its type and message, and when it was."""
    end = span.end_time or span.start_time or 0.0
    exceptions = [(event.attributes, event.timestamp or end) for event in span.events if event.name == "exception"]
    exceptions += [(span.attributes, end)] if span.name == conventions.SPAN_EXCEPTION else []
    for attributes, time in exceptions:
        yield _error(attributes.get("exception.type"), attributes.get("exception.message")), time
    if span.status.status_code == "ERROR" and not exceptions:
        yield _error(span.attributes.get("error.type"), span.status.description), end


def _error(kind: Any, message: Any) -> str:
    return ": ".join(filter(None, (str(kind or "").rpartition(".")[2], normal(str(message or ""))))) or "an error without a message"


def _tool(span: Span, by_id: Mapping[str, Span]) -> str:
    """Return the name of the tool that a span is of, or is within; empty if it is in none."""
    seen = set[str]()
    at: Span | None = span
    while at is not None and at.span_id not in seen:
        seen.add(at.span_id)
        if name := next((at.attributes[key] for key in _TOOL_NAMES if at.attributes.get(key)), None):
            return normal(str(name))
        if at.attributes.get(OPERATION) in TOOL_LIKE | {"execute_tool"}:
            return normal(at.name)
        at = by_id.get(at.parent_id or "")
    return ""


def _last_finish_reason(spans: Sequence[Span]) -> str:
    last = ""
    for span in spans:
        reasons = span.attributes.get("gen_ai.response.finish_reasons")
        if isinstance(reasons, (list, tuple)) and reasons:
            last = str(reasons[0])
    return normal(last)


def _last_reply(spans: Sequence[Span]) -> str:
    try:
        rows = conversations(to_messages(spans), Counter())
    except MALFORMED:
        return ""
    content = rows[-1]["messages"][-1].get("content") if rows else None
    return content if isinstance(content, str) else ""


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
