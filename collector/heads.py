"""What the collector looks at in every span of a request, read once, as columns. Pure.

A Python step for each span is most of what a request costs here, so that what can be asked of a whole column is: are all ids eight
bytes long, which time is the earliest. Only where such an answer is bad are spans looked at one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel_hook import conventions

PREFIX: Final = conventions.ROLLOUT_ID.split(".")[0] + "."  # of every key and name of ours
_PREFIX: Final = PREFIX.encode()
_ID_KEYS: Final = tuple(
    key.removeprefix(PREFIX).encode() for key in (conventions.ROLLOUT_ID, conventions.ATTEMPT_ID, conventions.SEQUENCE_ID)
)
_NAMES: Final = tuple(name.removeprefix(PREFIX).encode() for name in (conventions.SPAN_ATTEMPT, conventions.SPAN_SEAL))


class Heads(NamedTuple):
    """The columns; one entry for each span, in the order of the request, where nothing else is said."""

    spans: Sequence[Span]
    groups: Sequence[tuple[int, int]]
    """First span and the one after the last of each ResourceSpans."""
    trace_ids: Sequence[bytes]
    span_ids: Sequence[bytes]
    parent_ids: Sequence[bytes]
    times: Sequence[int]
    """Start and end of each span and the time of each event, in no order (Unix nanoseconds; 0 of an event is left out)."""
    id_keys: int | None
    """How often the key of an id of ours stands in the bytes, in resources too; None where they were not asked."""
    may_open: bool
    """Whether there may be an attempt span or a seal."""

    @classmethod
    def of(cls, request: ExportTraceServiceRequest, raw: bytes = b"") -> Heads:
        """Read a request; `raw`, its bytes, tells at once what it does not hold."""
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
        ours = [piece[:16] for piece in raw.split(_PREFIX)[1:]]  # as fast as memory is
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
