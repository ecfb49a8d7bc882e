"""0.3's `emitter`: agl_otel_hook.emit and agl_otel.spans."""

from __future__ import annotations

from agl_otel.spans.emitted import (
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
)
from agl_otel_hook.emit import (
    OperationContext,
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    encode_object,
    operation,
    reward,
)

__all__ = [
    "OperationContext",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "encode_object",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "operation",
    "reward",
]
