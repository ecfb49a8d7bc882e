"""0.3's `semconv`: agl_otel_hook.conventions under its names."""

from __future__ import annotations

from enum import Enum
from typing import Final

from agl_otel.spans.attributes import LinkPydanticModel, RewardPydanticModel
from agl_otel_hook import conventions

__all__ = [
    "AGL_ANNOTATION",
    "AGL_EXCEPTION",
    "AGL_MESSAGE",
    "AGL_OBJECT",
    "AGL_OPERATION",
    "AGL_REWARD",
    "AGL_VIRTUAL",
    "LightningResourceAttributes",
    "LightningSpanAttributes",
    "LinkAttributes",
    "LinkPydanticModel",
    "RewardAttributes",
    "RewardPydanticModel",
]
AGL_ANNOTATION: Final = conventions.SPAN_ANNOTATION
AGL_MESSAGE: Final = conventions.SPAN_MESSAGE
AGL_OBJECT: Final = conventions.SPAN_OBJECT
AGL_EXCEPTION: Final = conventions.SPAN_EXCEPTION
AGL_OPERATION: Final = conventions.SPAN_OPERATION
AGL_REWARD: Final = conventions.SPAN_REWARD
AGL_VIRTUAL: Final = conventions.SPAN_VIRTUAL


class LightningResourceAttributes(Enum):
    """Identity of a span, as resource attributes."""

    ROLLOUT_ID = conventions.ROLLOUT_ID
    ATTEMPT_ID = conventions.ATTEMPT_ID
    SPAN_SEQUENCE_ID = conventions.SEQUENCE_ID
    TRACER_NAME = conventions.TRACER_NAME


class LightningSpanAttributes(Enum):
    """Attributes (and prefixes of attributes) of spans."""

    REWARD = conventions.REWARD
    LINK = conventions.LINK
    TAG = conventions.TAG
    MESSAGE_BODY = conventions.MESSAGE_BODY
    OBJECT_TYPE = conventions.OBJECT_TYPE
    OBJECT_LITERAL = conventions.OBJECT_LITERAL
    OBJECT_JSON = conventions.OBJECT_JSON
    OPERATION_NAME = conventions.OPERATION_NAME
    OPERATION_INPUT = conventions.OPERATION_INPUT
    OPERATION_OUTPUT = conventions.OPERATION_OUTPUT


class RewardAttributes(Enum):
    """Attributes below `agentlightning.reward.{i}`."""

    REWARD_NAME = "name"
    REWARD_VALUE = "value"


class LinkAttributes(Enum):
    """Attributes below `agentlightning.link.{i}`."""

    KEY_MATCH = conventions.LINK_KEY_MATCH
    VALUE_MATCH = conventions.LINK_VALUE_MATCH
