"""Rewards and other things an agent or grader wants to say, as spans: names and attributes of Agent Lightning 0.3.

On the OpenTelemetry API alone: a span made here goes where every other span of the process goes, and belongs to the attempt in
whose context it is made. With `propagate=False` no span is made and only what it would hold is returned.
"""

from __future__ import annotations

from agl_otel_hook.emit.emitters import PRIMARY, emit_annotation, emit_exception, emit_message, emit_object, emit_reward, encode_object
from agl_otel_hook.emit.fields import SpanCoreFields, TraceStatus
from agl_otel_hook.emit.operation import OperationContext, operation, reward

__all__ = [
    "PRIMARY",
    "OperationContext",
    "SpanCoreFields",
    "TraceStatus",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "encode_object",
    "operation",
    "reward",
]
