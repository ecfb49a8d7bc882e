"""What vLLM and SGLang return beside OpenAI's protocol, from a server that answers as their code does (vLLM 0.33, SGLang 0.5.23)."""

from __future__ import annotations

import base64
import contextlib
import io
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import numpy as np
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
        self.refuse: Callable[[dict[str, Any]], str | None] = lambda _: None
        """Returns the error that a request gets."""
        self.url = ""
        self.stand: Stand

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        if (error := self.refuse(body)) is not None:
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


@pytest.mark.parametrize(("streamed", "defect"), [(False, None), (True, "no_logprobs")])
async def test_log_probs_of_text_beside_a_tool_call_are_of_all_tokens_unless_it_is_a_stream(
    engine: Engine, streamed: bool, defect: str | None
) -> None:
    def answer(body: dict[str, Any]) -> Any:
        whole = _response(body, [_text(body, -0.5, -0.25), TOOL], [_raw(7, 8)], 2)
        return [{"type": "response.completed", "response": whole}] if streamed else whole

    engine.answers["responses"] = answer
    _, span = await engine.ask("responses", model="any", input="hello", stream=streamed)
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [7, 8] and span.attributes.get(conventions.LLM_DEFECT) == defect
    assert span.attributes.get(conventions.LLM_RESPONSE_LOGPROBS) == (None if defect else [-0.5, -0.25])


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
        (lambda body: [_text(body, -0.5)], [_raw(7, 8)], 2, [7, 8], "logprobs_length"),
        (lambda body: [_text(body, -0.5), _text(body, -0.5)], [_raw(7, 8)], 2, [7, 8], "no_logprobs"),
        (lambda body: [TOOL, _text(body, -0.5)], [_raw(7), _raw(1, 2, 3, 7, 4), _raw(8)], 2, None, "token_count"),
        (lambda body: [_text(body)], [{"role": "assistant", "content": []}], 2, None, None),
    ],
    ids=["a tool call", "too few", "several texts", "a tool of the server's own", "gpt-oss"],
)
async def test_tokens_of_vllms_responses_that_are_not_proven_are_not_recorded(
    engine: Engine, output: Callable[[Any], list[Any]], sampled: list[Any], counted: int, ids: list[int] | None, defect: str | None
) -> None:
    engine.answers["responses"] = lambda body: _response(body, output(body), sampled, counted)
    _, span = await engine.ask("responses", model="any", input="hello")
    assert span.attributes.get(conventions.LLM_RESPONSE_TOKEN_IDS) == ids
    assert span.attributes.get(conventions.LLM_DEFECT) == defect and conventions.LLM_RESPONSE_LOGPROBS not in span.attributes


async def test_a_server_that_refuses_log_probs_of_responses_is_asked_without(engine: Engine) -> None:
    engine.refuse = lambda body: "logprobs are not supported with gpt-oss models" if body.get("include") else None
    engine.answers["responses"] = lambda body: _response(body, [_text(body)], [], 1)
    answer, _ = await engine.ask("responses", model="any", input="hello")
    assert isinstance(answer, dict) and answer["status"] == "completed"
    assert "include" not in engine.requests[-1] or engine.requests[-1]["include"] is None


def _chat(*, body: dict[str, Any], tokens: int = 2, **choice: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 2}}
    ids = {"token_ids": list(range(7, 7 + tokens))} if body.get("return_token_ids") else {}
    logprobs = {"content": [{"token": "t", "logprob": -0.5}] * tokens}
    message = {"role": "assistant", "content": "hi"}
    return {
        "id": "c", "object": "chat.completion", "model": "served", "prompt_token_ids": [1, 2, 3], "usage": usage,
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": logprobs, **ids, **choice}],
    }  # fmt: skip


def _spans(*spans: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


@pytest.mark.parametrize(
    ("choice", "version", "by_token"),
    [
        ({"weight_versions": _spans(("7", 0, 2))}, "7", None),
        ({"weight_versions": _spans(("7", 0, 1), ("8", 1, 2))}, "7", [["7", 0, 1], ["8", 1, 2]]),
        ({"weight_versions": _spans(("default", 0, 2))}, "3", None),  # nobody named them: the version of the resources counts
        ({"meta_info": {"weight_version": "8"}}, "8", None),
        ({"meta_info": {"weight_version": "8", "weight_versions": _spans(("7", 0, 1), ("8", 1, 2))}}, "7", [["7", 0, 1], ["8", 1, 2]]),
    ],
)
async def test_the_weights_that_an_engine_names_are_recorded(engine: Engine, choice: dict[str, Any], version: str, by_token: Any) -> None:
    engine.answers["chat/completions"] = lambda body: _chat(body=body, **choice)
    answer, span = await engine.ask("chat/completions", model="any", messages=HELLO)
    assert span.attributes[conventions.LLM_MODEL_VERSION] == version and engine.requests[0]["return_weight_versions"] is True
    held = span.attributes.get(conventions.LLM_WEIGHT_VERSIONS)
    assert (json.loads(held) if held else None) == by_token and conventions.LLM_DEFECT not in span.attributes
    assert isinstance(answer, dict) and "weight_versions" not in answer["choices"][0]


async def test_sglang_names_the_weights_and_the_tokens_of_a_whole_answer(engine: Engine) -> None:
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        whole = _chat(body={}, prompt_token_ids=[1, 2, 3], response_token_ids=[7, 8])
        return {**whole, "prompt_token_ids": None, "metadata": {"weight_version": "8", "weight_versions": _spans(("8", 0, 2))}}

    engine.answers["chat/completions"] = answer
    shown, span = await engine.ask("chat/completions", model="any", messages=HELLO)
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [7, 8] and span.attributes[conventions.LLM_MODEL_VERSION] == "8"
    assert span.attributes[conventions.LLM_RESPONSE_LOGPROBS] == [-0.5, -0.5]
    assert isinstance(shown, dict) and "response_token_ids" not in shown["choices"][0]


@pytest.mark.parametrize("spans", [(("7", 0, 1),), (("7", 0, 1), ("8", 1, 3)), (("7", 0, 1), ("8", 0, 2)), (("7", 1, 2),)])
async def test_versions_of_other_tokens_are_misaligned(engine: Engine, spans: Any) -> None:
    engine.answers["chat/completions"] = lambda body: _chat(body=body, weight_versions=_spans(*spans))
    _, span = await engine.ask("chat/completions", model="any", messages=HELLO)
    assert span.attributes[conventions.LLM_DEFECT] == span.attributes[conventions.LLM_INCOMPLETE] == "routing_misaligned"
    assert conventions.LLM_WEIGHT_VERSIONS not in span.attributes and not span.error


def _npy(experts: Any) -> str:
    file = io.BytesIO()
    np.save(file, experts)
    return base64.b64encode(file.getvalue()).decode()


EXPERTS = np.arange(4 * 3 * 2).reshape(4, 3, 2)  # of 3 + 2 - 1 tokens, in 3 layers, with 2 experts each


@pytest.mark.parametrize(
    ("asked", "choice", "extension", "recorded"),
    [
        ({}, {"routed_experts": _npy(EXPERTS.astype(np.uint16))}, None, EXPERTS),
        ({"routed_experts_prompt_start": 2}, {"routed_experts": _npy(EXPERTS[2:].astype(np.int32))}, None, EXPERTS[2:]),
        ({}, {}, base64.b64encode(EXPERTS.astype("<i4").tobytes()).decode(), EXPERTS.reshape(4, 6)),
        ({"routed_experts_start_len": 2}, {}, base64.b64encode(EXPERTS[2:].astype("<i4").tobytes()).decode(), EXPERTS[2:].reshape(2, 6)),
        ({"routed_experts_prompt_start": 2}, {}, base64.b64encode(EXPERTS.astype("<i4").tobytes()).decode(), EXPERTS.reshape(4, 6)),
    ],
    ids=["vllm", "vllm, from a token on", "sglang", "sglang, from a token on", "sglang, which knows no field of vllm's"],
)
async def test_experts_are_recorded_with_a_row_for_each_token(
    engine: Engine, asked: dict[str, Any], choice: dict[str, Any], extension: str | None, recorded: Any
) -> None:
    more = {"sglext": {"routed_experts": extension}} if extension else {}
    engine.answers["chat/completions"] = lambda body: {**_chat(body=body, **choice), **more}
    _, span = await engine.ask("chat/completions", model="any", messages=HELLO, return_routed_experts=True, **asked)
    found = np.load(io.BytesIO(base64.b64decode(span.attributes[conventions.LLM_ROUTED_EXPERTS])))
    assert found.dtype == np.uint8 and np.array_equal(found, recorded) and conventions.LLM_DEFECT not in span.attributes


@pytest.mark.parametrize(
    "experts",
    [_npy(EXPERTS[:3]), _npy(EXPERTS.astype(float)), base64.b64encode(bytes(5)).decode(), base64.b64encode(bytes(12)).decode(), "?", [1]],
    ids=["a token less", "no numbers of experts", "a piece", "of three tokens", "no base64", "no text"],
)
async def test_experts_of_other_tokens_are_misaligned(engine: Engine, experts: Any) -> None:
    engine.answers["chat/completions"] = lambda body: _chat(body=body, routed_experts=experts)
    _, span = await engine.ask("chat/completions", model="any", messages=HELLO, return_routed_experts=True)
    assert span.attributes[conventions.LLM_DEFECT] == span.attributes[conventions.LLM_INCOMPLETE] == "routing_misaligned"
    assert conventions.LLM_ROUTED_EXPERTS not in span.attributes and span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [7, 8]


@pytest.mark.parametrize(
    ("path", "usage", "read", "given"),
    [
        ("chat/completions", {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}, 4, 9),
        ("responses", {"input_tokens": 9, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}, 4, 9),
        ("messages", {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2}, 4, 9),
        ("chat/completions", {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None}, None, 9),
    ],
)
async def test_cached_tokens_are_recorded_by_their_conventional_name(
    engine: Engine, path: str, usage: dict[str, Any], read: int | None, given: int
) -> None:
    text = {"messages": {"type": "message", "content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn"}}
    response = {"object": "response", "output": [], "status": "completed"}
    chat = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    engine.answers[path] = lambda _: {**({"responses": response} | text).get(path, chat), "usage": usage}
    _, span = await engine.ask(path, model="any", messages=HELLO, input="hello", max_tokens=9)
    assert span.attributes.get("gen_ai.usage.cache_read.input_tokens") == read
    assert span.attributes["gen_ai.usage.input_tokens"] == given
    assert span.attributes.get("gen_ai.usage.cache_creation.input_tokens") == (2 if path == "messages" else None)


async def test_a_stream_of_sglang_has_the_tokens_in_its_own_field(engine: Engine) -> None:
    def answer(body: dict[str, Any]) -> Any:
        whole = _chat(body={}, prompt_token_ids=[1, 2, 3], response_token_ids=[7, 8])
        if not body.get("stream"):
            return whole
        choice = {"index": 0, "delta": {"content": "h"}, "finish_reason": None, "logprobs": {"content": [{"token": "t", "logprob": -0.5}]}}
        ids = {"sglext": {"input_ids": [1, 2, 3], "output_ids": [[7, 8]]}} if body.get("return_output_ids_in_sglext") else {}
        last = {**choice, "delta": {"content": "i"}, "finish_reason": "stop"}
        return [{"id": "c", "choices": [choice]}, {"id": "c", "choices": [last]}, *([{"id": "c", "choices": [], **ids}] if ids else [])]

    engine.refuse = lambda body: (
        "return_token_ids is not supported with streaming on /v1/chat/completions."
        if body.get("stream") and body.get("return_token_ids")
        else None
    )
    engine.answers["chat/completions"] = answer
    _, first = await engine.ask("chat/completions", model="any", messages=HELLO, stream=True)
    assert conventions.LLM_RESPONSE_TOKEN_IDS not in first.attributes
    shown, second = await engine.ask("chat/completions", model="any", messages=HELLO, stream=True)
    while conventions.LLM_RESPONSE_TOKEN_IDS not in second.attributes:  # the probe after the first call tells nobody when it is done
        shown, second = await engine.ask("chat/completions", model="any", messages=HELLO, stream=True)
    assert second.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == [1, 2, 3]
    assert second.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [7, 8]
    assert second.attributes[conventions.LLM_RESPONSE_LOGPROBS] == [-0.5, -0.5]
    assert len(shown) == 2 and "sglext" not in json.dumps(shown) and "-0.5" not in json.dumps(shown)
