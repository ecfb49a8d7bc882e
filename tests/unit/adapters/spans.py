"""Hand-made and recorded spans."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans

from agl_otel.types import Span
from agl_otel_hook import conventions, wire

RECORDED = Path(__file__).parents[2] / "recordings" / "spans"


def span(span_id: str, start: float, end: float, parent: str | None = None, *, name: str = "work", **attributes: Any) -> Span:
    """Make a span; `__` in a keyword stands for a dot."""
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=int(start * 10),
        trace_id="t",
        span_id=span_id,
        parent_id=parent,
        name=name,
        start_time=start,
        end_time=end,
        attributes={key.replace("__", "."): value for key, value in attributes.items()},
    )


def call(span_id: str, start: float, end: float, parent: str | None = None, **attributes: Any) -> Span:
    """A model call as Agent Lightning 0.3 stored it."""
    own = {
        "gen_ai__prompt__0__role": "user",
        "gen_ai__prompt__0__content": f"ask {span_id}",
        "gen_ai__completion__0__role": "assistant",
        "gen_ai__completion__0__content": f"answer {span_id}",
        "gen_ai__response__id": f"id-{span_id}",
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3],
    }
    return span(span_id, start, end, parent, name="openai.chat.completion", **{**own, **attributes})


def proxy_call(span_id: str, start: float, end: float, parent: str | None = None, **attributes: Any) -> Span:
    """Make a model call as the proxy stores it."""
    own = {
        conventions.LLM_CALL: 1,
        conventions.LLM_CHOICE: 0,
        conventions.PROCESS: "p",
        conventions.LLM_PROMPT_TOKEN_IDS: [7, 8],
        conventions.LLM_RESPONSE_TOKEN_IDS: [9],
        conventions.LLM_RESPONSE_LOGPROBS: [-0.5],
        "gen_ai.operation.name": "chat",
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "hi"}]}]),
        "gen_ai.response.id": f"id-{span_id}",
    }
    return span(span_id, start, end, parent, name=conventions.SPAN_LLM, **{**own, **attributes})


def reward(span_id: str, at: float, value: float, parent: str | None = None) -> Span:
    """A reward annotation."""
    return span(
        span_id,
        at,
        at,
        parent,
        name=conventions.SPAN_ANNOTATION,
        **{conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): value},
    )


def recorded(name: str) -> tuple[list[Span], list[dict[str, Any]]]:
    """Spans and log records of one recording."""
    content = json.loads((RECORDED / f"{name}.json").read_text())
    return [Span.model_validate(each) for each in content["spans"]], content["logs"]


def key_values(attributes: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes as OTLP."""
    return list(ResourceSpans.FromString(wire.resource_head(attributes)).resource.attributes)
