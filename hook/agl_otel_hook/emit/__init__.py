"""Emit rewards and other data of an agent or grader as spans, with names and attributes of Agent Lightning 0.3.

Uses the OpenTelemetry API alone: the spans are exported like all others of the process and belong to the attempt of the current context.
With `propagate=False` no span is made; its would-be fields are returned.
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
