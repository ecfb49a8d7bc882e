"""Convert stored spans to OTLP for Jaeger, with rollout, attempt, sequence, reward, token counts and verdict as tags.

Token ids and log-probs, which make up most of a trace, are replaced by their counts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from agl_otel.store import Store
from agl_otel.store.otlp import encodable, scope_head, span_field
from agl_otel.types import Span
from agl_otel_hook import conventions, wire

_COUNTED: Final = {
    conventions.LLM_PROMPT_TOKEN_IDS: conventions.SHOWN_PROMPT_TOKENS,
    conventions.LLM_RESPONSE_TOKEN_IDS: conventions.SHOWN_RESPONSE_TOKENS,
    conventions.LLM_RESPONSE_LOGPROBS: conventions.SHOWN_LOGPROBS,
}
"""{attribute with a long array: tag with its length}."""
SERVICE_NAME: Final = "service.name"
NO_SERVICE: Final = "unknown_service"
CHUNK_BYTES: Final = 1 << 20
"""Approximate size of a message, which holds at least one span. gRPC clients accept 4 MiB."""
PAGE_TRACES: Final = 20
"""Traces per query: one page of Jaeger's UI. An agent's trace may have 10 MB."""
TRACE_SPANS: Final = 10_000
"""Limit on the spans shown of one trace, and on the spans of one query."""
LEFT_OUT: Final = f"this trace has more than {TRACE_SPANS} spans and the later ones are left out: ask for them by SQL"
WARNINGS: Final = "@jaeger@warnings"  # where Jaeger's pages look for a span's warnings


@dataclass(frozen=True)
class Attempts:
    """Tags about whole attempts, which their first spans carry."""

    tags: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict[tuple[str, str], Mapping[str, Any]])

    @classmethod
    async def of(cls, store: Store, rollouts: Iterable[str]) -> Attempts:
        """Read verdicts and final rewards of all attempts of these rollouts. Rollouts unknown to the queue have none."""
        ids = sorted({rollout_id for rollout_id in rollouts if rollout_id})
        if not ids:
            return cls()
        tags: dict[tuple[str, str], dict[str, Any]] = {}
        for each in await store.reader.figures(list(await store.queue.query_attempts(ids))):
            own = tags[each.rollout_id, each.attempt_id] = {conventions.SHOWN_VERDICT: each.verdict.kind}
            if each.verdict.reasons:
                own[conventions.SHOWN_VERDICT_REASON] = "; ".join(each.verdict.reasons)
            if each.reward is not None:
                own[conventions.SHOWN_REWARD] = each.reward
        return cls(tags)


async def pages_of(store: Store, trace_ids: Sequence[str]) -> AsyncIterator[tuple[list[list[Span]], Attempts]]:
    """Read traces in the given order, up to PAGE_TRACES at a time, as pairs of their spans and the tags of their attempts.

    Unknown traces are skipped. A trace with more than TRACE_SPANS is cut to its first ones, and its first span gets a warning.
    """
    ids = [*dict.fromkeys(trace_ids)]
    pages = deque(ids[first : first + PAGE_TRACES] for first in range(0, len(ids), PAGE_TRACES))
    while pages:
        page = pages.popleft()
        rollouts = await store.rollouts_of_traces(page)
        spans, attempts = await asyncio.gather(
            store.spans_of_traces(page, rollouts=rollouts, limit=TRACE_SPANS + 1), Attempts.of(store, rollouts)
        )
        if len(spans) > TRACE_SPANS:
            if len(page) > 1:
                pages.extendleft([trace_id] for trace_id in reversed(page))
                continue
            spans.pop()
            spans[0].attributes[WARNINGS] = [LEFT_OUT]
        of_trace = {trace_id: list(own) for trace_id, own in groupby(spans, lambda span: span.trace_id)}
        yield [of_trace[trace_id] for trace_id in page if trace_id in of_trace], attempts


def traces_data(spans: Sequence[Span], attempts: Attempts) -> Iterator[TracesData]:
    """Encode spans sorted by trace as non-empty messages, each of one trace; a large trace takes several."""
    seen: set[tuple[str, str]] = set()
    roots = {(span.rollout_id, span.attempt_id) for span in spans if span.name == conventions.SPAN_ATTEMPT}
    for _, of_trace in groupby(spans, lambda span: span.trace_id):
        groups, size = dict[tuple[str, str], _Group](), 0
        for span in of_trace:
            key = (span.rollout_id, span.attempt_id)
            is_head = span.name == conventions.SPAN_ATTEMPT if key in roots else key not in seen
            tags = attempts.tags.get(key, {}) if is_head else {}
            seen.add(key)
            made = span_field(span, {**_shown(span), **tags}, 0)
            if groups and size + len(made) > CHUNK_BYTES:
                yield _message(groups)
                groups, size = {}, 0
            place = (repr(sorted(span.resource.attributes.items(), key=str)), repr(span.scope))
            if place not in groups:
                groups[place] = _Group(_resource_head(span), scope_head(span), [])
            groups[place].fields.append(made)
            size += len(made)
        if groups:
            yield _message(groups)


class _Group(NamedTuple):
    """Encoded spans of one resource and scope, the arguments of `wire.of_parts`."""

    resource: bytes
    scope: bytes
    fields: list[bytes]


def _message(groups: Mapping[tuple[str, str], _Group]) -> TracesData:
    return TracesData.FromString(b"".join(wire.of_parts(each.resource, each.scope, b"".join(each.fields)) for each in groups.values()))


def _resource_head(span: Span) -> bytes:
    attributes = dict(span.resource.attributes)
    for key in (conventions.ROLLOUT_ID, conventions.ATTEMPT_ID, conventions.SEQUENCE_ID):
        attributes.pop(key, None)  # each span has them as tags
    attributes[SERVICE_NAME] = attributes.get(SERVICE_NAME) or NO_SERVICE
    return wire.resource_head(encodable(attributes))


def _shown(span: Span) -> dict[str, Any]:
    shown = {key: value for key, value in span.attributes.items() if key not in _COUNTED}
    shown |= {name: len(span.attributes[key]) for key, name in _COUNTED.items() if isinstance(span.attributes.get(key), list)}
    if span.rollout_id:
        shown |= {
            conventions.ROLLOUT_ID: span.rollout_id,
            conventions.ATTEMPT_ID: span.attempt_id,
            conventions.SEQUENCE_ID: span.sequence_id,
        }
    return shown
