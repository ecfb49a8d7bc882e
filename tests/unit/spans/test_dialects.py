"""Every dialect against recordings of the real library; tests/recordings/README.md describes how they are made."""

from __future__ import annotations

import importlib
import json
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_otel.adapters import LlmProxyTraceToTriplet, TracerTraceToTriplet, TraceTree, to_messages
from agl_otel.errors import SpanShapeError
from agl_otel.spans import conversations, dialects
from agl_otel.spans.conversations import dialect_of, read_call, text_of_cut
from agl_otel.spans.dialects import DIALECTS
from agl_otel.spans.log_records import DETAILS, with_records
from agl_otel.types import Event, Span
from agl_otel_hook import conventions
from tests.peak_memory import peak_memory
from tests.unit.adapters.spans import RECORDED, call, recorded, span

DOCS = Path(__file__).parents[3] / "docs" / "dialects.md"
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
ASKED: list[dict[str, Any]] = [
    {"role": "system", "content": "Use the tool."},
    {"role": "user", "content": "What is the weather in Rome?"},
]
CALLED: list[dict[str, Any]] = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED: list[dict[str, Any]] = [*CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
SUNNY = {"role": "assistant", "content": "Sunny."}
PICTURE: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}],
    }
]


@dataclass(frozen=True)
class Expected:
    """Expected values of a recording; the conversations in order."""

    dialect: str
    messages: list[list[dict[str, Any]]]
    agent: str = "*"
    tools: bool = True
    ids: bool = True
    """Whether it names the response."""
    usage: bool = True
    tokens: int = 0
    """How many of the calls have token ids."""


BY_HAND = [CALLED, [*ANSWERED, SUNNY], [*PICTURE, SUNNY]]
BY_AGENT = [CALLED, [*ANSWERED, SUNNY]]
EXPECTED = {
    "openllmetry": Expected("gen_ai", BY_HAND),
    "openllmetry_flat": Expected("openllmetry_flat", BY_HAND),
    "openllmetry_langchain": Expected("gen_ai", BY_AGENT, agent="weather_agent"),
    "openinference": Expected("openinference", BY_HAND, tokens=3),
    "langsmith": Expected("langsmith", BY_HAND, tokens=2),
    "pydantic_ai": Expected("gen_ai", BY_AGENT, agent="weather_agent"),
    # It keeps no replies of chat completions, no tools and no usage.
    "openai_agents": Expected("gen_ai", [ASKED, ANSWERED], agent="weather_agent", tools=False, ids=False, usage=False),
    "openai_agents_openinference": Expected("openinference", BY_AGENT, agent="weather_agent", tools=False, ids=False),
    "vercel": Expected("vercel", BY_AGENT, agent="weather_agent"),
    # It keeps no tool calls.
    "litellm": Expected("litellm", [[*ASKED, SUNNY], [*ASKED, {"role": "assistant", "content": ""}]], tools=False),
    # It keeps no streamed reply.
    "agent_lightning_weave": Expected("agent_lightning_weave", [*BY_HAND[:2], [*PICTURE, {"role": "assistant", "content": ""}]], tokens=2),
    "gen_ai_events": Expected("gen_ai_events", BY_HAND, tools=False),
    # It keeps no tools, and no images.
    "gen_ai_details": Expected("gen_ai", [*BY_HAND[:2], [{"role": "user", "content": ""}, SUNNY]], tools=False),
}


def spans_of(name: str) -> list[Span]:
    spans, records = recorded(name)
    return with_records(spans, records)


def test_log_records_cannot_set_attributes_of_ours() -> None:
    """Agents send log records: none may turn a span into a call of the proxy, or into a reward set by the runner."""
    chat = span("chat", 1, 2, **{"gen_ai.operation.name": "chat"})
    fields = {conventions.LLM_CALL: 1, conventions.LLM_RESPONSE_TOKEN_IDS: [1], conventions.REWARD_GIVEN: True, "gen_ai.response.id": "r"}
    for place in ("attributes", "body"):
        record = {"trace_id": chat.trace_id, "span_id": chat.span_id, "event_name": DETAILS, place: fields}
        assert with_records([chat], [record])[0].attributes == {**chat.attributes, "gen_ai.response.id": "r"}


def test_every_recording_is_expected_and_every_dialect_but_ours_is_recorded() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} == set(EXPECTED)
    assert {expected.dialect for expected in EXPECTED.values()} == {dialect.name for dialect in DIALECTS} - {"agl"}


def test_every_file_of_a_dialect_is_registered_and_in_the_docs() -> None:
    files = {module.name for module in pkgutil.iter_modules(dialects.__path__)} - {"dialect", "shapes"}
    assert [importlib.import_module(f"agl_otel.spans.dialects.{name}").DIALECT in DIALECTS for name in files] == [True] * len(DIALECTS)
    rows = [line.split(" | ")[:2] for line in DOCS.read_text().splitlines() if line.startswith("| `")]
    assert rows == [[f"| `{dialect.name}`", dialect.written_by] for dialect in DIALECTS]


def test_the_dialect_of_the_docs_reads_the_spans_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    span_text, code = re.findall(r"```(?:text|python)\n(.*?)```", DOCS.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    monkeypatch.setattr(conversations, "DIALECTS", (namespace["DIALECT"], *DIALECTS))
    documented = span("a", 1, 2)
    for key, value in (line.split(maxsplit=1) for line in span_text.splitlines()):
        held = json.loads(value)
        documented.attributes[key] = value if isinstance(held, dict) else held
    read = read_call(documented)
    assert read is not None and (read.dialect.name, read.model, read.response_id, read.usage) == ("acme", "m", "r1", (3, 4))
    assert to_messages([documented]) == [
        {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}], "tools": None}
    ]


@pytest.mark.parametrize("name", EXPECTED)
def test_conversations_of_a_recording(name: str) -> None:
    expected = EXPECTED[name]
    samples = to_messages(spans_of(name))
    assert [[dict(sorted(m.items())) for m in s["messages"]] for s in samples] == [
        [dict(sorted(m.items())) for m in messages] for messages in expected.messages
    ]
    if expected.tools:
        assert [tool["function"]["name"] for tool in samples[0]["tools"]] == ["get_weather"]
        assert samples[0]["tools"][0]["function"]["parameters"]["required"] == ["city"]


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_of_a_recording_count_once_with_all_fields(name: str) -> None:
    expected = EXPECTED[name]
    calls = TraceTree.from_spans(spans_of(name)).find_llm_calls()
    assert [call.calls[0].dialect.name for call in calls] == [expected.dialect] * len(expected.messages)
    assert {call.calls[0].model for call in calls} == {"m"}
    assert {call.agent for call in calls} == {expected.agent}
    ids = [call.response_id for call in calls]
    assert [i.startswith("chatcmpl-") for i in ids] == [expected.ids] * len(calls)
    assert len(set(ids)) == (len(calls) if expected.ids else 1)
    assert calls[0].calls[0].usage == ((3, 4) if expected.usage else (None, None))
    assert sum(call.tokens is not None for call in calls) == expected.tokens


@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if expected.tokens])
def test_token_ids_of_a_recording_are_the_servers(name: str) -> None:
    triplet = next(t for t in TracerTraceToTriplet()(spans_of(name)) if t.prompt["token_ids"])
    text = "".join(map(chr, triplet.prompt["token_ids"]))
    assert text == "\x01Use the tool.\x02\x01What is the weather in Rome?\x02\x01"  # the server's ids are code points
    assert "".join(map(chr, triplet.response["token_ids"])) == "Sunny."


def test_agents_of_a_recording_are_selected() -> None:
    for name in ("pydantic_ai", "openllmetry_langchain", "vercel", "openai_agents_openinference"):
        assert len(TracerTraceToTriplet(agent_match="^weather_agent$")(spans_of(name))) == 2
        assert TracerTraceToTriplet(agent_match="^judge$")(spans_of(name)) == []


def test_the_reward_in_spans_stored_by_agent_lightning_is_found() -> None:
    rewards = [triplet.reward for triplet in TracerTraceToTriplet()(spans_of("agent_lightning_weave"))]
    assert rewards[-1] == 0.75
    assert LlmProxyTraceToTriplet()(spans_of("agent_lightning_weave")) == []


def test_tools_and_agents_are_no_model_calls() -> None:
    for attributes in (
        {"gen_ai.operation.name": "invoke_agent"},
        {"openinference.span.kind": "TOOL"},
        {"ai.operationId": "ai.toolCall"},
        {},
    ):
        assert dialect_of(span("s", 1, 2, **attributes)) is None


def strands_call(*, tool: bool) -> Span:
    """A call as strands-agents 1.62 writes it: events with the Bedrock content blocks of each message as JSON."""
    use = {"toolUse": {"toolUseId": "call_1", "name": "get_weather", "input": {"city": "Rome"}}}
    answer = {"toolResult": {"toolUseId": "call_1", "status": "success", "content": [{"text": "sunny"}]}}
    events: list[tuple[str, list[dict[str, Any]]]] = [
        ("gen_ai.user.message", [{"text": "What is the weather in Rome?"}]),
        ("gen_ai.assistant.message", [{"text": "I look."}, use]),
        ("gen_ai.tool.message", [answer]),
    ]
    made = span("s", 1, 2, name="chat", **{"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"})
    made.events = [Event(name=name, attributes={"content": json.dumps(blocks)}) for name, blocks in events]
    reply = [use] if tool else [{"reasoningContent": {"reasoningText": {"text": "hm"}}}, {"text": "Sunny."}]
    made.events.append(Event(name="gen_ai.choice", attributes={"finish_reason": "end_turn", "message": json.dumps(reply)}))
    return made


def test_content_blocks_of_strands_are_messages() -> None:
    asked = [ASKED[1], {**CALLED[-1], "content": "I look."}, ANSWERED[-1]]
    assert to_messages([strands_call(tool=False)]) == [{"messages": [*asked, SUNNY], "tools": None}]
    assert to_messages([strands_call(tool=True)]) == [{"messages": [*asked, CALLED[-1]], "tools": None}]


def test_a_choice_with_a_plain_text_message_is_read() -> None:
    made = strands_call(tool=False)
    made.events[-1].attributes["message"] = "[no JSON"
    assert to_messages([made])[0]["messages"][-1] == {"role": "assistant", "content": "[no JSON"}


def test_results_of_azures_content_filter_are_no_message() -> None:
    filtered = call("a", 1, 2)
    filtered.attributes["gen_ai.prompt.prompt_filter_results"] = '[{"prompt_index": 0, "content_filter_results": {}}]'
    filtered.attributes["gen_ai.completion.0.content_filter_results"] = "{}"
    assert to_messages([filtered]) == to_messages([call("a", 1, 2)])


def test_a_malformed_span_is_logged_and_does_not_affect_others(caplog: pytest.LogCaptureFixture) -> None:
    broken = call("a", 1, 2)
    broken.attributes["gen_ai.prompt.2.role"] = "user"
    assert to_messages([broken, call("b", 3, 4)]) == to_messages([call("b", 3, 4)])
    triplets = TracerTraceToTriplet()([broken])
    assert [(triplet.prompt["token_ids"], triplet.response["token_ids"]) for triplet in triplets] == [([1, 2], [3])]
    named = r"span a \(openai.chat.completion\) of rollout ro-1 .*openllmetry_flat"
    assert len(caplog.records) == 2
    assert all(
        re.search(named, record.getMessage()) and "\n" not in record.getMessage() and not record.exc_info for record in caplog.records
    )
    read = read_call(broken)
    assert read is not None
    with pytest.raises(SpanShapeError, match=named):
        _ = read.conversation
    assert issubclass(SpanShapeError, ValueError)


@pytest.mark.parametrize("piece", ["x", "\\n"])
def test_showing_a_long_truncated_text_takes_linear_memory(piece: str) -> None:
    messages = f'[{{"role": "assistant", "parts": [{{"type": "text", "content": "{piece * 500_000}'
    with peak_memory() as peak:
        assert text_of_cut(messages) == piece.replace("\\n", "\n") * 500_000
    assert peak.bytes < 5 * len(messages)
