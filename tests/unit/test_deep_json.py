"""JSON of an agent or model that is nested ten thousand levels deep is shown as text or left out, by every reader."""

from __future__ import annotations

import io

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from rich.console import Console

from agl_otel.adapters.masking import MaskRule
from agl_otel.adapters.otlp_masking import Masker
from agl_otel.algorithms.grpo.tools import for_template, read_calls
from agl_otel.cli.render import span_label
from agl_otel.collector.adopt import input_of
from agl_otel.errors import AgentError
from agl_otel.proxy.parts import tool_call_part
from agl_otel.runner.agents.http import parse_answer
from agl_otel.spans.conversations import NO_MESSAGES, written
from agl_otel.types import Span

LEVELS = 10_000
DEEP = [f"{'[' * LEVELS}{']' * LEVELS}", f'{{"a":{"[" * LEVELS}{"]" * LEVELS}}}', f"{'[' * LEVELS}"]
OUTPUT = "gen_ai.output.messages"


@pytest.mark.parametrize("deep", DEEP, ids=["list", "object", "cut"])
def test_json_nested_too_deeply_breaks_no_reader(deep: str) -> None:
    span = Span(
        rollout_id="ro", attempt_id="at", sequence_id=1, trace_id="1" * 32, span_id="2" * 16, name="chat", attributes={OUTPUT: deep}
    )
    assert written(span) == NO_MESSAGES
    Console(file=io.StringIO()).print(span_label(span))
    assert input_of({"input.value": deep}) in (deep, None)
    assert tool_call_part("1", "f", deep)["arguments"] == deep
    assert parse_answer("text/event-stream", f"data: {deep}\n\n") == deep
    with pytest.raises(AgentError, match="cannot be parsed"):
        parse_answer("application/json", deep)
    assert read_calls(f"<tool_call>{deep}</tool_call>", "x")[1] == []
    call = {"function": {"name": "f", "arguments": deep}}
    assert for_template({"tool_calls": [call, {"function": {"arguments": {}}}]})["tool_calls"][0] == call


@pytest.mark.parametrize("deep", DEEP, ids=["list", "object", "cut"])
def test_a_rule_masks_json_nested_too_deeply_to_be_parsed(deep: str) -> None:
    request = ExportTraceServiceRequest()
    attribute = request.resource_spans.add().scope_spans.add().spans.add().attributes.add(key=OUTPUT)
    attribute.value.string_value = deep.replace("[[", "[0,[", 1) + " 4711"
    kept = Masker([MaskRule("drop_text", text="4711")]).masked("traces", request.SerializeToString())
    assert b"4711" not in kept and b"[[[[" not in kept
