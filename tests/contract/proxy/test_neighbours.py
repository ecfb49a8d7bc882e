"""An agent's choices do not affect others: neither what is recorded of their calls, nor their route."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver, Received

OTHER = "/rollout/ro-2/attempt/at-1"
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "usage": {"input_tokens": 3, "output_tokens": 1}}
SAID = {"content": [{"type": "text", "text": "native"}], "stop_reason": "end_turn"}
IDS = {"prompt_token_ids": [1, 2], "token_ids": [3]}


async def post(stand: Stand, path: str, body: Any, **headers: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.post(stand.url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def spans_of(stand: Stand, rollout_id: str) -> list[Received]:
    return [span for span in await stand.calls() if span.key == (rollout_id, "at-1")]


@contextlib.asynccontextmanager
async def native(receiver: OtlpReceiver) -> AsyncGenerator[tuple[Stand, list[Any]]]:
    """A server with Messages and Responses, which returns token ids on request; and the requests that it got."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        if "input" not in body and "messages" not in body:
            return web.json_response({"error": {"message": "Field required"}}, status=422)
        missing = body.get("previous_response_id")
        if missing or '"' in body.get("model", ""):
            return web.json_response({"error": {"message": f"{missing or body['model']!r} does not exist"}}, status=404)
        return web.json_response({**MESSAGE, **SAID, **(IDS if body.get("return_token_ids") is True else {})})

    server = ModelServer({"/v1/messages": answer, "/v1/responses": answer})
    await server.start()
    try:
        async with proxy(receiver, FixedUpstreams(Upstream(server.url))) as stand:
            yield stand, asked
    finally:
        await server.stop()


@pytest.mark.parametrize("own", [{}, {"top_logprobs": 1}, {"return_token_ids": None}])
async def test_an_error_that_quotes_an_agent_costs_others_no_token_ids(stand: Stand, model: ModelServer, own: dict[str, Any]) -> None:
    model.refused = "return_token_ids and logprobs are what I say"
    body = {"model": "m", "messages": [{"role": "user", "content": model.refused}], **own}
    for _ in range(3):
        assert (await post(stand, f"{SCOPE}/v1/chat/completions", body))[0] == 400
    assert (await post(stand, f"{OTHER}/v1/chat/completions", {"model": "m", "messages": HELLO}))[0] == 200
    (span,) = await spans_of(stand, "ro-2")
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS]


async def test_a_refused_model_or_key_costs_others_no_token_ids(receiver: OtlpReceiver, model: ModelServer) -> None:
    model.refused = "of-the-attacker"
    async with proxy(receiver, FixedUpstreams(Upstream(model.url))) as stand:
        for name in ("of-the-attacker", "return_token_ids of-the-attacker"):
            body = {"model": name, "messages": [{"role": "user", "content": "return_token_ids"}]}
            for _ in range(2):
                assert (await post(stand, f"{SCOPE}/v1/chat/completions", body, authorization="Bearer x"))[0] == 400
        assert (await post(stand, f"{OTHER}/v1/chat/completions", {"model": "m", "messages": HELLO}))[0] == 200
        (span,) = await spans_of(stand, "ro-2")
        assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS]


async def test_a_server_that_refuses_the_fields_is_probed_by_the_proxy_itself(stand: Stand, model: ModelServer) -> None:
    model.plain = True
    headers = {"x-of-the-agent": "1", "authorization": "Bearer of-the-agent"}
    body = {"model": "m", "messages": [{"role": "user", "content": "of-the-agent"}]}
    assert (await post(stand, f"{SCOPE}/v1/chat/completions", body, **headers))[0] == 200
    await stand.until(lambda _: len(model.requests) == 6)
    questions = [place for place, request in enumerate(model.requests) if "of-the-agent" not in json.dumps(request)]
    assert ["return_token_ids" in model.requests[place] for place in questions] == [True, True, False]
    for place in questions:
        assert (model.requests[place]["max_tokens"], model.requests[place]["model"]) == (1, "served-model")
        assert "x-of-the-agent" not in model.headers[place] and model.headers[place]["authorization"] == "Bearer real-key"


@pytest.mark.parametrize(
    ("path", "body"),
    [("messages", {"model": 'a"b', "messages": HELLO}), ("responses", {"model": "m", "input": "x", "previous_response_id": "resp_none"})],
)
async def test_a_not_found_of_one_agent_costs_others_no_route(receiver: OtlpReceiver, path: str, body: dict[str, Any]) -> None:
    async with native(receiver) as (stand, _):
        status, said = await post(stand, f"{SCOPE}/v1/{path}", body)
        assert status == 404 and "does not exist" in said
        asked = {"model": "m", "messages": HELLO, "input": "x"}
        status, said = await post(stand, f"{OTHER}/v1/{path}", asked)
        assert status == 200 and "native" in said
        assert (await post(stand, f"{SCOPE}/v1/{path}", asked))[0] == 200, "its own way has not changed either"


@pytest.mark.parametrize("levels", [300, 900])
async def test_a_body_that_cannot_be_recorded_affects_only_its_call(stand: Stand, model: ModelServer, levels: int) -> None:
    model.prompt_tokens = [1]
    before = (await stand.health())["failures"]  # of this process, in which other files' tests have run
    deep = b'{"model": "m", "messages": [{"role": "user", "content": "a", "x": ' + b"[" * levels + b"]" * levels + b"}]}"
    for path, body in ((SCOPE, deep), (OTHER, json.dumps({"model": "m", "messages": HELLO}).encode())):
        async with aiohttp.ClientSession() as session, session.post(f"{stand.url}{path}/v1/chat/completions", data=body) as answer:
            assert answer.status in ((200, 400) if body is deep else (200,))
    (span,) = await spans_of(stand, "ro-2")
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS]
    assert (await stand.health())["failures"] == before
