"""Keeps the spans and log records of this process and writes them to $RECORDING, in the form of agl_otel.types.Span."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

from opentelemetry import _logs, trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

try:
    from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter as InMemoryLogs
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
except ImportError:  # older SDKs
    from opentelemetry.sdk._logs.export import InMemoryLogExporter as InMemoryLogs
    from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor

QUESTION = "What is the weather in Rome?"
SYSTEM = "Use the tool."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_spans, _records = InMemorySpanExporter(), InMemoryLogs()


def start(provider=None):
    """The global provider (or the given one) with an exporter that keeps everything."""
    if provider is None:
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(_spans))
    logs = LoggerProvider()
    logs.add_log_record_processor(SimpleLogRecordProcessor(_records))
    _logs.set_logger_provider(logs)
    try:  # conventions up to 1.36 sent their messages through an API of its own
        from opentelemetry import _events
        from opentelemetry.sdk._events import EventLoggerProvider

        _events.set_event_logger_provider(EventLoggerProvider(logs))
    except ImportError:
        pass
    return provider


def _plain(value):
    if isinstance(value, dict) or hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def span(number, src):
    """One span of the SDK as JSON."""
    return {
        "rollout_id": "ro-1",
        "attempt_id": "at-1",
        "sequence_id": number,
        "trace_id": f"{src.context.trace_id:032x}",
        "span_id": f"{src.context.span_id:016x}",
        "parent_id": f"{src.parent.span_id:016x}" if src.parent else None,
        "name": src.name,
        "kind": src.kind.name.capitalize(),
        "status": {"status_code": src.status.status_code.name, "description": src.status.description},
        "attributes": _plain(src.attributes or {}),
        "events": [{"name": e.name, "attributes": _plain(e.attributes or {}), "timestamp": e.timestamp / 1e9} for e in src.events],
        "start_time": src.start_time / 1e9,
        "end_time": src.end_time / 1e9,
        "scope": {"name": src.instrumentation_scope.name, "version": src.instrumentation_scope.version or ""},
    }


def write(*packages, spans=None):
    """Write $RECORDING; `packages` are those whose versions matter."""
    kept = (
        [span(i, s) for i, s in enumerate(sorted(_spans.get_finished_spans(), key=lambda s: s.start_time), 1)] if spans is None else spans
    )
    records = []
    for item in _records.get_finished_logs():
        r = item.log_record
        name = getattr(r, "event_name", None) or (r.attributes or {}).get("event.name")
        where = {"trace_id": f"{r.trace_id:032x}", "span_id": f"{r.span_id:016x}"}
        records.append({**where, "event_name": name, "body": _plain(r.body), "attributes": _plain(r.attributes or {})})
    versions = {package: metadata.version(package) for package in packages}
    content = {"versions": versions, "spans": kept, "logs": records}
    Path(os.environ["RECORDING"]).write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n")


def by_hand(client):
    """The agent that uses the OpenAI SDK itself: a question, a tool call, its answer; then one streamed call without tools."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="m", messages=messages, tools=[TOOL], temperature=0.5)
    call = answer.choices[0].message.tool_calls[0]
    said = {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
    messages += [
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    client.chat.completions.create(model="m", messages=messages, tools=[TOOL], temperature=0.5)
    for _ in client.chat.completions.create(model="m", messages=picture(), stream=True):
        pass


def picture():
    """A question with an image."""
    url = "https://example.com/cat.png"
    return [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": url}}]}]
