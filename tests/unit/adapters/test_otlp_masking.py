"""Matching content is not stored, whichever instrumentation wrote it; the rest can still be read."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from agl_otel.adapters import TracerTraceToTriplet, to_messages
from agl_otel.adapters.masking import MaskRule
from agl_otel.adapters.otlp_masking import Masker, load_masker
from agl_otel.adapters.texts import MASKED
from agl_otel.errors import SettingsError
from agl_otel.settings import Settings
from agl_otel.spans.log_records import with_records
from agl_otel.stack import otelcol
from agl_otel.store.otlp import request_of
from agl_otel.types import Event, Span
from agl_otel_hook import conventions
from tests.unit.adapters.spans import RECORDED, key_values, proxy_call, recorded

RECORDINGS = sorted(path.stem for path in RECORDED.glob("*.json"))
SECRETS = (b"Rome", b"Sunny", b"sunny", b"Use the tool", b"What is", b"cat.png")


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return {item.key: plain(item.value) for item in value.kvlist_value.values}
    return getattr(value, kind) if kind else None


def hexed(text: str, digits: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:digits]  # a recording of Agent Lightning has ids that OTLP cannot carry


def masked(spans: list[Span], *rules: MaskRule) -> tuple[list[Span], bytes, Masker]:
    """Return the spans after masking, and the bytes that would be stored."""
    carried = [
        span.model_copy(
            update={
                "trace_id": hexed(span.trace_id, 32),
                "span_id": hexed(span.span_id, 16),
                "parent_id": hexed(span.parent_id, 16) if span.parent_id else None,
                "context": None,
                "parent": None,
                "links": [],
            }
        )
        for span in spans
    ]
    masker = Masker(rules)
    raw = masker.masked("traces", request_of(carried))
    kept = [s for r in ExportTraceServiceRequest.FromString(raw).resource_spans for p in r.scope_spans for s in p.spans]
    return (
        [
            span.model_copy(
                update={
                    "attributes": {a.key: plain(a.value) for a in one.attributes},
                    "events": [Event(name=e.name, attributes={a.key: plain(a.value) for a in e.attributes}) for e in one.events],
                }
            )
            for span, one in zip(carried, kept, strict=True)
        ],
        raw,
        masker,
    )


def masked_records(records: list[dict[str, Any]], *rules: MaskRule) -> tuple[list[dict[str, Any]], bytes]:
    request = ExportLogsServiceRequest()
    made = request.resource_logs.add().scope_logs.add().log_records
    for record in records:
        (body,) = key_values({"body": record["body"]})
        made.add(event_name=record["event_name"] or "", body=body.value, attributes=key_values(record["attributes"]))
    raw = Masker(rules).masked("logs", request.SerializeToString())
    kept = ExportLogsServiceRequest.FromString(raw).resource_logs[0].scope_logs[0].log_records
    return [
        {**record, "body": plain(one.body), "attributes": {a.key: plain(a.value) for a in one.attributes}}
        for record, one in zip(records, kept, strict=True)
    ], raw


@pytest.mark.parametrize("action", ["drop_text", "hash_text"])
@pytest.mark.parametrize("name", RECORDINGS)
def test_no_message_of_a_recording_is_left(name: str, action: str) -> None:
    spans, records = recorded(name)
    kept, raw, masker = masked(spans, MaskRule(action))
    kept_records, raw_records = masked_records(records, MaskRule(action)) if records else ([], b"")
    assert [secret for secret in SECRETS if secret in raw or secret in raw_records] == []
    assert masker.counts["texts"] or records
    own = {s.span_id: k.span_id for s, k in zip(spans, kept, strict=True)}
    traces = {s.trace_id: k.trace_id for s, k in zip(spans, kept, strict=True)}
    linked_records = [{**r, "span_id": own[r["span_id"]], "trace_id": traces[r["trace_id"]]} for r in kept_records]
    to_messages(with_records(kept, linked_records))  # readable still
    ids = [t.response["token_ids"] for t in TracerTraceToTriplet()(kept)]
    if name == "agent_lightning_weave":  # it has them in attributes of their own
        assert [row for row in ids if row]


def test_a_rule_masks_only_matching_messages() -> None:
    messages = [
        {"role": "user", "parts": [{"type": "text", "content": "write to a@b.example"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "c", "name": "mail", "arguments": {"to": "a@b.example"}}]},
        {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c", "response": "sent to a@b.example"}]},
        {"role": "user", "parts": [{"type": "text", "content": "thanks"}]},
    ]
    call = proxy_call("a", 1, 2, **{"gen_ai.input.messages": json.dumps(messages)})
    (kept,), _, masker = masked(
        [call], MaskRule("drop_text", role="user", text="@"), MaskRule("hash_text", role="tool", text="@", salt="s")
    )
    (sample,) = to_messages([kept])
    digest = "sha256:" + hashlib.sha256(b"ssent to a@b.example").hexdigest()
    assert [m["content"] for m in sample["messages"]] == [MASKED, None, digest, "thanks", "hi"]
    assert sample["messages"][2]["tool_call_id"] == "c"
    assert kept.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == [7, 8]
    assert masker.counts == {"texts": 2}


@pytest.mark.parametrize(
    ("rule", "more", "prompt", "response"),
    [
        (MaskRule("drop_ids", role="assistant"), {}, [7, 8], [0]),
        (MaskRule("drop_ids", role="user"), {}, [0, 0], [9]),
        (MaskRule("drop_ids"), {}, [0, 0], [0]),
        (MaskRule("drop_ids", text="nothing of that"), {}, [7, 8], [9]),
        # Its messages go on from call 3, its ids from call 2: what lies between is not on this span.
        (MaskRule("drop_ids", text="none"), {conventions.LLM_MESSAGES_CALL: 3, conventions.LLM_PREFIX_CALL: 2}, [0, 0], [9]),
        (MaskRule("drop_ids", text="none"), {conventions.LLM_MESSAGES_CALL: 2, conventions.LLM_PREFIX_CALL: 2}, [7, 8], [9]),
    ],
)
def test_dropped_ids_do_not_shift_the_following_ones(rule: MaskRule, more: Any, prompt: list[int], response: list[int]) -> None:
    (kept,), _, _ = masked([proxy_call("a", 1, 2, **more, **{conventions.LLM_ROUTED_EXPERTS: "AAAA"})], rule)
    held = kept.attributes
    assert (held[conventions.LLM_PROMPT_TOKEN_IDS], held[conventions.LLM_RESPONSE_TOKEN_IDS]) == (prompt, response)
    dropped, touched = response == [0], [*prompt, *response] != [7, 8, 9]
    assert (held.get(conventions.LLM_INCOMPLETE), conventions.LLM_RESPONSE_LOGPROBS in held) == (
        conventions.LLM_MASKED if touched else None,
        not dropped,
    )
    assert (conventions.LLM_ROUTED_EXPERTS in held) is not touched
    assert "hello" in held["gen_ai.input.messages"]  # the text is another rule's


def test_all_ids_of_a_call_with_unknown_messages_are_dropped() -> None:
    call = proxy_call("a", 1, 2)
    silent = call.model_copy(update={"attributes": {k: v for k, v in call.attributes.items() if "messages" not in k}})
    (kept,), _, _ = masked([silent], MaskRule("drop_ids", role="user", text="x"))
    assert (kept.attributes[conventions.LLM_PROMPT_TOKEN_IDS], kept.attributes[conventions.LLM_RESPONSE_TOKEN_IDS]) == ([0, 0], [0])


@pytest.mark.parametrize("name", ["openinference", "langsmith", "agent_lightning_weave", "litellm"])
def test_ids_of_other_dialects_are_dropped_too(name: str) -> None:
    kept, _, _ = masked(recorded(name)[0], MaskRule("drop_ids"))
    assert not any(t.prompt["token_ids"] or t.response["token_ids"] for t in TracerTraceToTriplet()(kept))


def test_an_agents_output_is_masked_by_rules_without_a_role() -> None:
    printed = {"event_name": "", "body": "my number is 42", "attributes": {}}
    assert masked_records([printed], MaskRule("drop_text", text="[0-9]"))[0][0]["body"] == MASKED
    assert masked_records([printed], MaskRule("drop_text", role="user"))[0][0]["body"] == "my number is 42"


@pytest.mark.parametrize("action", ["drop_text", "hash_text", "drop_ids"])
def test_masked_content_is_not_masked_again(action: str) -> None:
    """A proxy's journal is masked, and so are its spans again in the collector, by the same rules."""
    rules = [MaskRule(action, salt="s"), MaskRule("hash_text", role="user", salt="t")]
    _, raw, _ = masked([proxy_call("a", 1, 2)], *rules)
    assert ExportTraceServiceRequest.FromString(Masker(rules).masked("traces", raw)) == ExportTraceServiceRequest.FromString(raw)


def test_a_request_without_matches_is_kept_unchanged() -> None:
    masker = Masker([MaskRule("drop_text", text="secret")])
    for raw in (request_of([proxy_call("a" * 16, 1, 2).model_copy(update={"trace_id": "b" * 32})]), b"\xff\xff", b""):
        assert masker.masked("traces", raw) is raw


def test_a_rules_file_that_cannot_be_used_stops_the_collector(tmp_path: Path) -> None:
    assert load_masker("") is None
    with pytest.raises(SettingsError, match="cannot be read"):
        load_masker(str(tmp_path / "none.toml"))
    file = tmp_path / "rules.toml"
    for content, reason in (("[[rule]]\naction = 'burn'", "burn"), ("[[rule]]\naction = 'drop_text'\nagent = 'a'", "names an agent")):
        file.write_text(content)
        with pytest.raises(SettingsError, match=reason):
            load_masker(str(file))


def test_the_opentelemetry_collector_refuses_to_start_with_masking_rules() -> None:
    settings = Settings.load(collector=sys.executable, clickhouse_url="clickhouse://127.0.0.1:9000", mask="rules.toml")
    with pytest.raises(SettingsError, match="AGL_MASK is for the Python collector"):
        otelcol.check(settings)
