"""OTLP load: agent-shaped spans, serialised once. Each request gets fresh ids by patching bytes, so that the client costs little CPU."""

from __future__ import annotations

import itertools
import json
import os
import random
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agl_otel_hook import conventions, wire

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

    The spans name the (rollout, attempt) of `ids` in turn, or ids made up. The templates are made at once, which takes a second, so that
    no measured request waits for them.
    """
    chance = random.Random(seed)
    names = itertools.cycle(ids or [(f"ro-bench-{number}", f"at-{number}") for number in range(5000)])
    made = [_request(chance, number * 1000, spans_per_request, token_ids, names) for number in range(templates)]
    return _salted(made)


def _salted(made: Sequence[bytes]) -> Iterator[bytes]:
    """Repeat these requests without end, each time with other trace and span ids."""
    for count in itertools.count(int.from_bytes(os.urandom(3)) << 8):
        salt = struct.pack(">I", count & 0xFFFFFFFF)
        yield made[count % len(made)].replace(_TRACE_SALT, salt).replace(_SPAN_SALT, salt)


def _request(chance: random.Random, first: int, spans: int, token_ids: int, names: Iterator[tuple[str, str]]) -> bytes:
    groups: list[bytes] = []
    for attempt in range(-(-spans // SPANS_PER_ATTEMPT)):
        rollout_id, attempt_id = next(names)
        ids = {conventions.ROLLOUT_ID: rollout_id, conventions.ATTEMPT_ID: attempt_id, "service.name": "agent", "process.pid": 4242}
        left = min(SPANS_PER_ATTEMPT, spans - attempt * SPANS_PER_ATTEMPT)
        groups.append(_group(ids, [_span(chance, first + attempt, number, token_ids) for number in range(left)]))
    return b"".join(groups)


def _group(resource: Mapping[str, object], spans: Sequence[bytes]) -> bytes:
    return wire.of_parts(wire.resource_head(resource), wire.scope_head(""), b"".join(map(wire.field_of, spans)))


def request_of(spans: Sequence[Mapping[str, Any]], resource: Mapping[str, object]) -> bytes:
    """Encode one request of spans given as {name, trace_id, span_id, attributes}, ids in hex; they start now and last a millisecond."""
    now = time.time_ns()
    made = [
        wire.message(
            bytes.fromhex(span["trace_id"]), bytes.fromhex(span["span_id"]), b"", span["name"], 0, now + place, now + place + 1_000_000,
            span["attributes"],
        )
        for place, span in enumerate(spans)
    ]  # fmt: skip
    return _group(resource, made)


def attempt_request(rollout_id: str, attempt_id: str, spans: int, attributes: int) -> bytes:
    """Encode one request with spans of one attempt, each with so many short attributes."""
    trace_id = os.urandom(16).hex()
    values = {f"attribute.{number}": f"value of attribute {number}" for number in range(attributes)}
    made = [{"name": "work", "trace_id": trace_id, "span_id": os.urandom(8).hex(), "attributes": values} for _ in range(spans)]
    return request_of(made, {conventions.ROLLOUT_ID: rollout_id, conventions.ATTEMPT_ID: attempt_id})


def _span(chance: random.Random, attempt: int, number: int, token_ids: int) -> bytes:
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
    return wire.message(
        _TRACE_SALT + struct.pack(">IQ", 1, attempt),
        _SPAN_SALT + struct.pack(">I", attempt * 8 + number),
        _SPAN_SALT + struct.pack(">I", attempt * 8) if number else b"",
        "chat" if call else "invoke_agent" if number == 0 else "execute_tool",
        0,
        now,
        now + 1_000_000,
        values,
    )


def _text(chance: random.Random, size: int) -> str:
    return " ".join(chance.choice(_WORDS) for _ in range(size // 5))
