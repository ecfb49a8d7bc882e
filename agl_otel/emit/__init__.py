"""Rewards and other things an agent or grader wants to say, as spans: names and attributes of Agent Lightning 0.3.

On the OpenTelemetry API alone: a span made here goes where every other span of the process goes, and belongs to the attempt in
whose context it is made. With `propagate=False` no span is made and only what it would hold is returned.
"""

from __future__ import annotations

from agl_otel.attributes import flatten_attributes
from agl_otel.emit.emitters import PRIMARY, emit_annotation, emit_exception, emit_message, emit_object, emit_reward, encode_object
from agl_otel.emit.operation import OperationContext, operation, reward
from agl_otel.emit.read import (
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)

__all__ = [
    "PRIMARY",
    "OperationContext",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "encode_object",
    "find_final_reward",
    "find_reward_spans",
    "flatten_attributes",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "operation",
    "reward",
]
