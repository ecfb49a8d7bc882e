"""Every route, as its clients call it: forwarded, recorded, and without fields that the agent did not request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl_otel.proxy import app
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, ask, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

MESSAGE: dict[str, Any] = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "claude", "content": [{"type": "text", "text": "hi"}],
    "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 2, "output_tokens": 1},
}  # fmt: skip
RESPONSE: dict[str, Any] = {
    "id": "resp_1", "object": "response", "created_at": 0, "model": "m", "status": "completed", "parallel_tool_calls": True,
    "tool_choice": "auto", "tools": [], "usage": {"input_tokens": 2, "output_tokens": 1, "total_tokens": 3},
    "output": [{"id": "m", "type": "message", "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": "hi", "annotations": []}]}],
}  # fmt: skip
IDS = {"prompt_token_ids": [1, 2], "token_ids": [3]}
EVENTS: dict[str, list[tuple[str, Any]]] = {
    "messages": [
        (
            "message_start",
            {"type": "message_start", "message": {**MESSAGE, "content": [], "stop_reason": None, "prompt_token_ids": [1, 2]}},
        ),
        ("content_block_start", {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}),
        ("content_block_delta", {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hi"}}),
        ("message_delta", {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}, "token_ids": [3]}),
        ("message_stop", {"type": "message_stop"}),
    ],
    "responses": [
        ("response.created", {"type": "response.created", "response": {**RESPONSE, "output": [], "status": "in_progress"}}),
        ("response.output_text.delta", {"type": "response.output_text.delta", "delta": "hi"}),
        ("response.completed", {"type": "response.completed", "response": {**RESPONSE, **IDS}}),
    ],
}


SEEN = web.AppKey("seen", list[tuple[Any, dict[str, str]]])


async def _native(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    request.app[SEEN].append((body, dict(request.headers)))
    kind = request.path.rpartition("/")[2]
    if not body.get("stream"):
        whole = {**(MESSAGE if kind == "messages" else RESPONSE), **(IDS if body.get("return_token_ids") else {})}
        return web.json_response(whole)
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for name, payload in EVENTS[kind]:
        await response.write(f"event: {name}\ndata: {json.dumps(payload)}\n\n".encode())
    return response


class Native:
    """A model server with all protocols."""

    def __init__(self, stand: Stand, seen: list[tuple[Any, dict[str, str]]]) -> None:
        self.stand, self.seen = stand, seen


@pytest.fixture
async def native(receiver: OtlpReceiver) -> AsyncIterator[Native]:
    app = web.Application()
    app[SEEN] = []
    app.router.add_post("/v1/messages", _native)
    app.router.add_post("/v1/responses", _native)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    async with proxy(receiver, FixedUpstreams(Upstream(url, "served", "real-key", {"temperature": 0.5, "max_tokens": 7}))) as stand:
        yield Native(stand, app[SEEN])
    await runner.cleanup()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["responses", "messages"])
@pytest.mark.parametrize("prefix", [SCOPE, f"{SCOPE}/v1"])
async def test_other_protocols_pass_through_and_are_recorded(native: Native, path: str, streamed: bool, prefix: str) -> None:
    body = {"model": "any", "input": "hello", "messages": [{"role": "user", "content": "hello"}], "stream": streamed}
    headers = {"x-api-key": "agl-dummy", "anthropic-version": "2023-06-01"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{native.stand.url}{prefix}/{path}", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200
        text = await answer.text()
    assert "hi" in text and "token_ids" not in text
    if streamed:
        assert [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event")] == [e for e, _ in EVENTS[path]]
    (sent, given) = native.seen[0]
    assert (sent["model"], sent["temperature"], sent["return_token_ids"]) == ("served", 0.5, True)
    assert sent["max_output_tokens" if path == "responses" else "max_tokens"] == 7
    given = {name.lower(): value for name, value in given.items()}
    assert given["authorization"] == "Bearer real-key" and given.get("x-api-key") == ("real-key" if path == "messages" else None)
    (span,) = await native.stand.calls()
    held = span.attributes
    assert (held[conventions.LLM_CALL], held[conventions.LLM_PROMPT_TOKEN_IDS], held[conventions.LLM_RESPONSE_TOKEN_IDS]) == (
        1,
        [1, 2],
        [3],
    )
    assert held["gen_ai.provider.name"] == ("anthropic" if path == "messages" else "openai")
    assert held["gen_ai.response.id"] in ("msg_1", "resp_1") and held["gen_ai.usage.output_tokens"] == 1
    assert held["gen_ai.response.finish_reasons"] == ["stop"] and not span.error
    assert '"hello"' in held["gen_ai.input.messages"] and '"hi"' in held["gen_ai.output.messages"]


async def test_completions_are_recorded_with_tokens(stand: Stand) -> None:
    async with stand.client() as client:
        answer = await client.completions.create(model="m", prompt="abc")
    assert answer.choices[0].text == "cba" and answer.choices[0].logprobs is None
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == [97, 98, 99]
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [99, 98, 97]
    assert span.attributes[conventions.LLM_RESPONSE_LOGPROBS] == [-0.5] * 3


async def test_embeddings_are_recorded_and_are_no_model_calls(stand: Stand, model: ModelServer) -> None:
    async with stand.client() as client:
        answer = await client.embeddings.create(model="e", input="abc", encoding_format="float")
    assert answer.data[0].embedding == [0.5, 1.0] and "temperature" not in model.requests[0]
    (span,) = await stand.calls()
    assert span.attributes["gen_ai.operation.name"] == "embeddings" and conventions.LLM_CALL not in span.attributes
    assert (await stand.close())["spans"] == 1 and "without_token_ids" not in (await stand.health())["counts"]


async def test_embeddings_after_the_close_are_refused_as_model_calls_are(stand: Stand, model: ModelServer) -> None:
    await ask(stand.client())
    closed = await stand.close()
    for path, body in (("embeddings", {"model": "e", "input": "abc"}), ("chat/completions", {"model": "m", "messages": HELLO})):
        status, answer, _ = await stand.post(f"{SCOPE}/v1/{path}", body)
        assert (status, answer["error"]["code"]) == (410, "over")
    assert await stand.close() == closed and len(await stand.calls()) == 1 and len(model.requests) == 1


async def test_the_close_waits_for_embeddings_under_way(stand: Stand, model: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "CLOSE_WAIT_SECONDS", 60.0)
    model.hold = asyncio.Event()
    embedding = asyncio.create_task(stand.post(f"{SCOPE}/v1/embeddings", {"model": "e", "input": "abc"}))
    await model.asked.wait()
    closing = asyncio.create_task(stand.close())
    await asyncio.wait([closing], timeout=0.2)
    model.hold.set()
    assert (await closing)["spans"] == 1 and (await embedding)[0] == 200


async def test_counting_tokens_is_passed_on_and_not_recorded(stand: Stand, model: ModelServer) -> None:
    status, answer, _ = await stand.post(f"{SCOPE}/v1/messages/count_tokens", {"messages": []})
    assert (status, answer) == (200, {"input_tokens": 5}) and len(model.requests) == 1
    assert await stand.calls() == []


async def test_tools_and_images_reach_the_server_as_they_are(stand: Stand, model: ModelServer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ü": {"type": "string"}}}}}]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, image]}],
        "tools": tools,
        "seed": 2**53 + 1,
    }
    assert (await stand.post(f"{SCOPE}/v1/chat/completions", body))[0] == 200
    assert {name: model.requests[0][name] for name in ("messages", "tools", "seed")} == {
        name: body[name] for name in ("messages", "tools", "seed")
    }
    (span,) = await stand.calls()
    assert "data:image/png;base64,AAAA" in span.attributes["gen_ai.input.messages"]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("chat/completions", {"type": "function", "function": {"name": "search", "strict": True, "parameters": {"type": "object"}}}),
        ("messages", {"name": "search", "input_schema": {"type": "object"}, "strict": True}),
        ("responses", {"type": "function", "name": "search", "parameters": {"type": "object"}, "strict": True}),
    ],
)
async def test_definitions_of_tools_are_recorded_in_one_form(stand: Stand, path: str, given: dict[str, Any]) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    body = {"model": "m", "messages": HELLO, "input": "x", "max_tokens": 1, "tools": [given, hosted, "none", {"type": "custom"}]}
    await stand.post(f"{SCOPE}/v1/{path}", body)
    (span,) = await stand.calls()
    (written,) = json.loads(span.attributes["gen_ai.tool.definitions"])
    assert written == {"type": "function", "function": {"name": "search", "strict": True, "parameters": {"type": "object"}}}


async def test_equal_definitions_of_tools_are_stored_once_in_an_attempt(stand: Stand) -> None:
    first, second = [tool("first")], [tool("first"), tool("second")]
    for tools in (first, first, second, first, None):
        asked = {"model": "m", "messages": [{"role": "user", "content": "x"}], **({"tools": tools} if tools else {})}
        assert (await stand.post(f"{SCOPE}/v1/chat/completions", asked))[0] == 200
    spans = sorted(await stand.calls(), key=lambda span: span.attributes[conventions.LLM_CALL])
    written = [span.attributes.get("gen_ai.tool.definitions") for span in spans]
    referred = [span.attributes.get(conventions.LLM_TOOLS_CALL) for span in spans]
    assert [json.loads(text) if text else None for text in written] == [first, None, second, None, None]
    assert referred == [None, 1, None, 1, None]
