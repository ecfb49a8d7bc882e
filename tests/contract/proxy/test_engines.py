"""What vLLM and SGLang return beside OpenAI's protocol, from a server that answers as their code does (vLLM 0.33, SGLang 0.5.23)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, proxy
from tests.otlp_receiver import OtlpReceiver, Received

Answer = Callable[[dict[str, Any]], "list[dict[str, Any]] | dict[str, Any]"]
"""Makes the answer to a request: an object, or the events of a stream."""


class Engine:
    """A model server: `answers` has what each route returns, `requests` what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[dict[str, Any]] = []
        self.refusals: list[tuple[bytes, str]] = []
        """(text in a request, the error that it gets)."""
        self.url = ""
        self.stand: Stand

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        self.requests.append(body)
        for text, error in self.refusals:
            if text in raw:
                return web.json_response({"error": {"message": error, "type": "BadRequestError", "code": 400}}, status=400)
        given = self.answers[request.path.removeprefix("/v1/")](body)
        if isinstance(given, dict):
            return web.json_response(given)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for payload in given:
            await response.write(f"data: {json.dumps(payload)}\n\n".encode())
        return response

    async def ask(self, path: str, **body: Any) -> tuple[dict[str, Any] | list[dict[str, Any]], Received]:
        """Make an attempt's call; return what the agent got, and the span of the last call."""
        async with aiohttp.ClientSession() as session, session.post(f"{self.stand.url}{SCOPE}/v1/{path}", json=body) as answer:
            text = await answer.text()
            assert answer.status == 200, text
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines] if lines else json.loads(text), (await self.stand.calls())[-1]


@pytest.fixture
async def engine(receiver: OtlpReceiver) -> AsyncIterator[Engine]:
    found = Engine()
    app = web.Application()
    app.router.add_post("/v1/{path:.*}", found.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with contextlib.AsyncExitStack() as stack:
        upstream = Upstream(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "served", version="3")
        found.stand = await stack.enter_async_context(proxy(receiver, FixedUpstreams(upstream)))
        yield found
    await runner.cleanup()


def _raw(*tokens: int) -> dict[str, Any]:
    return {"message": "…", "tokens": list(tokens), "type": "raw_message_tokens"}


def _logprobs(*values: float) -> list[dict[str, Any]]:
    return [{"token": "t", "logprob": value, "bytes": [116], "top_logprobs": []} for value in values]


def _text(body: dict[str, Any], *values: float) -> dict[str, Any]:
    asked = "message.output_text.logprobs" in (body.get("include") or ())
    part = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": _logprobs(*values) if asked else None}
    return {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": [part]}


TOOL = {"id": "fc", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"}


def _response(body: dict[str, Any], output: list[Any], sampled: list[Any], counted: int) -> dict[str, Any]:
    asked = body.get("enable_response_messages")
    usage = {"input_tokens": 3, "output_tokens": counted, "total_tokens": 3 + counted, "input_tokens_details": {"cached_tokens": 2}}
    return {
        "id": "resp_1", "object": "response", "created_at": 0, "model": "served", "status": "completed", "output": output, "usage": usage,
        "input_messages": [_raw(1, 2, 3)] if asked else None, "output_messages": sampled if asked else None,
    }  # fmt: skip


async def test_responses_of_vllm_have_the_tokens_of_its_raw_messages(engine: Engine) -> None:
    engine.answers["responses"] = lambda body: _response(body, [_text(body, -0.5, -0.25)], [_raw(7, 8)], 2)
    answer, span = await engine.ask("responses", model="any", input="hello", include=["reasoning.encrypted_content"])
    assert engine.requests[0]["include"] == ["reasoning.encrypted_content", "message.output_text.logprobs"]
    held = span.attributes
    assert (held[conventions.LLM_PROMPT_TOKEN_IDS], held[conventions.LLM_RESPONSE_TOKEN_IDS]) == ([1, 2, 3], [7, 8])
    assert held[conventions.LLM_RESPONSE_LOGPROBS] == [-0.5, -0.25] and conventions.LLM_DEFECT not in held
    assert isinstance(answer, dict) and answer["input_messages"] is None and answer["output_messages"] is None
    assert answer["output"][0]["content"][0]["logprobs"] is None


@pytest.mark.parametrize("encode", [lambda message: message, json.dumps])
async def test_a_streamed_response_of_vllm_has_them_in_its_last_event(engine: Engine, encode: Callable[[Any], Any]) -> None:
    def events(body: dict[str, Any]) -> list[dict[str, Any]]:
        whole = _response(body, [_text(body, -0.5, -0.25)], [encode(_raw(7, 8))], 2)
        return [
            {"type": "response.created", "response": {**whole, "output": [], "status": "in_progress"}},
            {"type": "response.output_text.delta", "delta": "hi", "logprobs": _logprobs(-0.5, -0.25)},
            {"type": "response.content_part.done", "part": whole["output"][0]["content"][0]},
            {"type": "response.output_item.done", "item": whole["output"][0]},
            {"type": "response.completed", "response": whole},
        ]

    engine.answers["responses"] = events
    answer, span = await engine.ask("responses", model="any", input="hello", stream=True)
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [7, 8]
    assert span.attributes[conventions.LLM_RESPONSE_LOGPROBS] == [-0.5, -0.25]
    assert "-0.5" not in json.dumps(answer) and "raw_message_tokens" not in json.dumps(answer)
    assert isinstance(answer, list) and answer[1]["logprobs"] == []


async def test_what_the_agent_requested_of_vllm_stays_in_the_answer(engine: Engine) -> None:
    engine.answers["responses"] = lambda body: _response(body, [_text(body, -0.5)], [_raw(7)], 1)
    answer, _ = await engine.ask(
        "responses", model="any", input="hello", enable_response_messages=True, include=["message.output_text.logprobs"]
    )
    assert isinstance(answer, dict) and answer["output_messages"] == [_raw(7)]
    assert answer["output"][0]["content"][0]["logprobs"] == _logprobs(-0.5)


@pytest.mark.parametrize(
    ("output", "sampled", "counted", "ids", "defect"),
    [
        (lambda _: [TOOL], [_raw(7, 8)], 2, [7, 8], "no_logprobs"),
        (lambda body: [_text(body, -0.5), TOOL], [_raw(7, 8)], 2, [7, 8], "logprobs_length"),
        (lambda body: [TOOL, _text(body, -0.5)], [_raw(7), _raw(1, 2, 3, 7, 4), _raw(8)], 2, None, "token_count"),
        (lambda body: [_text(body)], [{"role": "assistant", "content": []}], 2, None, None),
    ],
    ids=["a tool call", "text and a tool call", "a tool of the server's own", "gpt-oss"],
)
async def test_tokens_of_vllms_responses_that_are_not_proven_are_not_recorded(
    engine: Engine, output: Callable[[Any], list[Any]], sampled: list[Any], counted: int, ids: list[int] | None, defect: str | None
) -> None:
    engine.answers["responses"] = lambda body: _response(body, output(body), sampled, counted)
    _, span = await engine.ask("responses", model="any", input="hello")
    assert span.attributes.get(conventions.LLM_RESPONSE_TOKEN_IDS) == ids
    assert span.attributes.get(conventions.LLM_DEFECT) == defect and conventions.LLM_RESPONSE_LOGPROBS not in span.attributes


async def test_a_server_that_refuses_log_probs_of_responses_is_asked_without(engine: Engine) -> None:
    engine.refusals = [(b"message.output_text.logprobs", "logprobs are not supported with gpt-oss models")]
    engine.answers["responses"] = lambda body: _response(body, [_text(body)], [], 1)
    answer, _ = await engine.ask("responses", model="any", input="hello")
    assert isinstance(answer, dict) and answer["status"] == "completed"
    assert "include" not in engine.requests[-1] or engine.requests[-1]["include"] is None
