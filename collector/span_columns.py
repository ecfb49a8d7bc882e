"""Span columns: the fields that the collector checks in every span of a request, read once, as columns. Pure.

A Python step per span is most of a request's cost here, so checks run on whole columns: are all ids eight bytes long, which time is the
earliest. Only if such a check fails are spans inspected one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel_hook import conventions

PREFIX: Final = conventions.ROLLOUT_ID.split(".")[0] + "."  # prefix of all our keys and names
_PREFIX: Final = PREFIX.encode()
_ID_KEYS: Final = tuple(
    key.removeprefix(PREFIX).encode() for key in (conventions.ROLLOUT_ID, conventions.ATTEMPT_ID, conventions.SEQUENCE_ID)
)
_NAMES: Final = tuple(name.removeprefix(PREFIX).encode() for name in (conventions.SPAN_ATTEMPT, conventions.SPAN_SEAL))


class SpanColumns(NamedTuple):
    """The columns; unless noted, one entry per span in the order of the request."""

    spans: Sequence[Span]
    groups: Sequence[tuple[int, int]]
    """Index of the first span of each ResourceSpans, and of the one after its last."""
    trace_ids: Sequence[bytes]
    span_ids: Sequence[bytes]
    parent_ids: Sequence[bytes]
    times: Sequence[int]
    """Start and end of each span and the time of each event, unordered (Unix nanoseconds; event times of 0 are left out)."""
    id_keys: int | None
    """How often one of our id keys occurs in the bytes, including resources; None if the bytes were not given."""
    may_open: bool
    """Whether there may be an attempt span or a seal."""

    @classmethod
    def of(cls, request: ExportTraceServiceRequest, raw: bytes = b"") -> SpanColumns:
        """Read a request; its bytes, `raw`, allow a fast check for keys and names that it lacks."""
        spans: list[Span] = []
        groups: list[tuple[int, int]] = []
        for resource_spans in request.resource_spans:
            first = len(spans)
            for scope_spans in resource_spans.scope_spans:
                spans += scope_spans.spans
            groups.append((first, len(spans)))
        times = [span.start_time_unix_nano for span in spans]
        times += [span.end_time_unix_nano for span in spans]
        times += [event.time_unix_nano for span in spans for event in span.events if event.time_unix_nano]
        ours = [piece[:16] for piece in raw.split(_PREFIX)[1:]]  # runs at memory speed
        ids = sum(piece.startswith(_ID_KEYS) for piece in ours)
        return cls(
            spans,
            groups,
            [span.trace_id for span in spans],
            [span.span_id for span in spans],
            [span.parent_span_id for span in spans],
            times,
            ids if raw else None,
            not raw or any(piece.startswith(_NAMES) and not piece.startswith(_ID_KEYS) for piece in ours),
        )
