"""OTLP load: agent-shaped spans, serialised once; each request gets ids of its own by a byte patch, so that the client costs little."""

from __future__ import annotations

import itertools
import json
import os
import random
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agl_otel_hook import conventions

SPANS_PER_ATTEMPT: Final = 6
_TRACE_SALT: Final = b"\xa7\x15\x9e\x3c"  # in the trace ids of a template; replaced in every request
_SPAN_SALT: Final = b"\xb3\x5d\xe1\x7a"
_WORDS: Final = (
    "the",
    "agent",
    "asks",
    "a",
    "model",
    "for",
    "its",
    "next",
    "query",
    "and",
    "reads",
    "what",
    "came",
    "back",
    "before",
    "going",
    "on",
)


def requests(
    spans_per_request: int, *, templates: int = 16, token_ids: int = 0, seed: int = 7, ids: Sequence[tuple[str, str]] = ()
) -> Iterator[bytes]:
    """Endless requests of about 1.5 KB a span, six spans an attempt; `token_ids` on each model call where it is not 0.

    The spans name the (rollout, attempt) of `ids` in turn, or ids made up.
    """
    chance = random.Random(seed)
    names = itertools.cycle(ids or [(f"ro-bench-{number}", f"at-{number}") for number in range(5000)])
    made = [_request(chance, number * 1000, spans_per_request, token_ids, names) for number in range(templates)]
    for count in itertools.count(int.from_bytes(os.urandom(3)) << 8):
        salt = struct.pack(">I", count & 0xFFFFFFFF)
        yield made[count % templates].replace(_TRACE_SALT, salt).replace(_SPAN_SALT, salt)


def _request(chance: random.Random, first: int, spans: int, token_ids: int, names: Iterator[tuple[str, str]]) -> bytes:
    request = ExportTraceServiceRequest()
    for attempt in range(-(-spans // SPANS_PER_ATTEMPT)):
        group = request.resource_spans.add()
        rollout_id, attempt_id = next(names)
        ids = {conventions.ROLLOUT_ID: rollout_id, conventions.ATTEMPT_ID: attempt_id, "service.name": "agent", "process.pid": 4242}
        group.resource.attributes.extend(_attributes(ids))
        left = min(SPANS_PER_ATTEMPT, spans - attempt * SPANS_PER_ATTEMPT)
        group.scope_spans.add().spans.extend(_span(chance, first + attempt, number, token_ids) for number in range(left))
    return request.SerializeToString()


def request_of(spans: Sequence[Mapping[str, Any]], resource: Mapping[str, object]) -> bytes:
    """One request of spans given as {name, trace_id, span_id, attributes}, ids as hex; they start now and last a millisecond."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(_attributes(resource))
    now = time.time_ns()
    group.scope_spans.add().spans.extend(
        Span(
            trace_id=bytes.fromhex(span["trace_id"]),
            span_id=bytes.fromhex(span["span_id"]),
            name=span["name"],
            start_time_unix_nano=now + place,
            end_time_unix_nano=now + place + 1_000_000,
            attributes=_attributes(span["attributes"]),
        )
        for place, span in enumerate(spans)
    )
    return request.SerializeToString()


def attempt_request(rollout_id: str, attempt_id: str, spans: int, attributes: int) -> bytes:
    """One request with spans of one attempt, each with so many short attributes."""
    trace_id = os.urandom(16).hex()
    values = {f"attribute.{number}": f"value of attribute {number}" for number in range(attributes)}
    made = [{"name": "work", "trace_id": trace_id, "span_id": os.urandom(8).hex(), "attributes": values} for _ in range(spans)]
    return request_of(made, {conventions.ROLLOUT_ID: rollout_id, conventions.ATTEMPT_ID: attempt_id})


def _span(chance: random.Random, attempt: int, number: int, token_ids: int) -> Span:
    now = time.time_ns()
    call = number in (1, 3)
    values: dict[str, object] = {
        "gen_ai.operation.name": "chat" if call else "execute_tool",
        "gen_ai.request.model": "a/model-7b",
        "gen_ai.request.temperature": 0.7,
        "gen_ai.usage.input_tokens": chance.randrange(900),
        "server.port": 8000,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.input.messages": json.dumps([{"role": "user", "parts": [{"content": _text(chance, 900)}]}]),
        "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [{"content": _text(chance, 300)}]}]),
    }
    if call and token_ids:
        values[conventions.LLM_PROMPT_TOKEN_IDS] = [chance.randrange(151_000) for _ in range(token_ids)]
        values[conventions.LLM_RESPONSE_TOKEN_IDS] = [chance.randrange(151_000) for _ in range(token_ids // 4)]
    return Span(
        trace_id=_TRACE_SALT + struct.pack(">IQ", 1, attempt),
        span_id=_SPAN_SALT + struct.pack(">I", attempt * 8 + number),
        parent_span_id=_SPAN_SALT + struct.pack(">I", attempt * 8) if number else b"",
        name="chat" if call else "invoke_agent" if number == 0 else "execute_tool",
        start_time_unix_nano=now,
        end_time_unix_nano=now + 1_000_000,
        attributes=_attributes(values),
    )


def _text(chance: random.Random, size: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(size // 5))


def _attributes(values: Mapping[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_value(value)) for key, value in values.items()]


def _value(value: object) -> AnyValue:
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_value(item) for item in value]))  # pyright: ignore[reportUnknownVariableType] items of any kind
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value) if isinstance(value, float) else AnyValue(string_value=str(value))
