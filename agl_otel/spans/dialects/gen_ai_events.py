"""OpenTelemetry's conventions for generative AI up to 1.36: each message is an event of the span, or a log record (log_records.py)."""

from __future__ import annotations

from agl_otel.spans.dialects.dialect import Dialect
from agl_otel.spans.dialects.gen_ai import OPERATIONS
from agl_otel.spans.dialects.shapes import from_events

DIALECT = Dialect(
    name="gen_ai_events",
    written_by="OpenTelemetry up to 1.36 (also the forms before 1.28), strands-agents, and any call whose messages are not captured",
    call=({"gen_ai.operation.name": OPERATIONS},),
    read=from_events,
)
