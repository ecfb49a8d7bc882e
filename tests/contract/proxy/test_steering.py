"""Calls through litellm: an agent's request can change the sampling, but never which model answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from agl_otel.proxy.dialects import DIALECTS
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

SAMPLING = {"safety_settings": [1], "extra_body": {"min_p": 0.1, "google": {"cached": True}}}
ASKED = {"model": "m", "messages": HELLO, "prompt": "hello", "input": "hello", "max_tokens": 5}
OWN = {
    "chat/completions": {"messages"},
    "completions": {"prompt"},
    "responses": {"input"},
    "messages": {"messages", "max_tokens"},
    "embeddings": {"input"},
    "messages/count_tokens": {"messages"},
}
"""{route: what of ASKED it takes besides the model}."""


@pytest.fixture
async def behind_litellm(receiver: OtlpReceiver, model: ModelServer) -> AsyncIterator[Stand]:
    """A proxy with models of litellm; a model server stands in for it and records the requests."""
    upstream = Upstream("litellm:", "gemini/flash", "provider's-key", SAMPLING, provider="litellm")
    async with proxy(receiver, FixedUpstreams(upstream), limits=Limits(litellm_url=model.url)) as stand:
        yield stand


def body(path: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in ASKED.items() if name in OWN[path] | {"model"}} | more


@pytest.mark.parametrize("path", OWN)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fallbacks", [{"m": ["other"]}]),
        ("context_window_fallbacks", [{"m": ["other"]}]),
        ("custom_llm_provider", "openai"),
        ("api_base", "http://127.0.0.1:1"),
        ("base_url", "http://127.0.0.1:1"),
        ("api_key", "sk-other"),
        ("num_retries", 3),
        ("extra_headers", {"x-goog-api-key": "k"}),
        ("extra_body", {"api_base": "http://127.0.0.1:1"}),
        ("mock_response", "made up"),
        ("litellm_metadata", {"tags": ["other"]}),
        ("safety_settings", ["not what was published"]),
        ("no_such_field", None),
    ],
)
async def test_a_field_that_is_not_of_the_protocol_is_refused_by_name(
    behind_litellm: Stand, model: ModelServer, path: str, name: str, value: Any
) -> None:
    status, answer, _ = await behind_litellm.post(f"{SCOPE}/v1/{path}", body(path, **{name: value}))
    said = answer["error"]
    assert (status, said["code"]) == (400, "field") and repr(name) in said["message"] and "sampling_parameters" in said["message"]
    assert model.requests == [] and await behind_litellm.calls() == [], "it takes no call number"


@pytest.mark.parametrize("method", ["get", "post"])
async def test_the_list_of_models_takes_no_body_at_all(behind_litellm: Stand, method: str) -> None:
    url = f"{behind_litellm.url}{SCOPE}/v1/models"
    async with aiohttp.ClientSession() as session, session.request(method, url, json={"fallbacks": ["other"]}) as answer:
        assert answer.status == (400 if method == "get" else 405)


@pytest.mark.parametrize("path", ["chat/completions", "messages/count_tokens"])
async def test_metadata_which_litellm_reads_is_not_passed_to_it(behind_litellm: Stand, model: ModelServer, path: str) -> None:
    status, _, _ = await behind_litellm.post(
        f"{SCOPE}/v1/{path}", body(path, metadata={"user_id": "u", "tags": ["other"]}, client_metadata={})
    )
    assert status == 200 and [set(request) & {"metadata", "client_metadata", "tags"} for request in model.requests] == [set()]


async def test_what_the_operator_published_may_be_asked_by_the_agent_too(behind_litellm: Stand, model: ModelServer) -> None:
    told = {"safety_settings": [1], "min_p": 0.1, "google": {"cached": True}}  # as an SDK sends the sampling parameters it was told
    assert (await behind_litellm.post(f"{SCOPE}/v1/chat/completions", body("chat/completions", **told)))[0] == 200
    (sent,) = model.requests
    assert {name: sent[name] for name in told} == told and sent["model"] == "gemini/flash"


async def test_headers_to_litellm_are_dropped(behind_litellm: Stand, model: ModelServer) -> None:
    headers = {"X-LiteLLM-Tags": "other", "x-litellm-num-retries": "3", "LiteLLM-Disable-Message-Redaction": "true", "x-mine": "kept"}
    assert (await behind_litellm.post(f"{SCOPE}/v1/chat/completions", body("chat/completions"), **headers))[0] == 200
    (sent,) = model.headers
    assert [name for name in sent if "litellm" in name.lower()] == [] and sent["x-mine"] == "kept"


async def test_a_counted_body_is_read_as_json_whatever_the_agent_calls_it(behind_litellm: Stand, model: ModelServer) -> None:
    """As a form it would have other fields than those that were checked."""
    text = json.dumps(body("messages/count_tokens", system="&fallbacks=other&"))
    headers = {"content-type": "application/x-www-form-urlencoded"}
    url = f"{behind_litellm.url}{SCOPE}/v1/messages/count_tokens"
    async with aiohttp.ClientSession() as session, session.post(url, data=text, headers=headers) as answer:
        assert answer.status == 200
    assert [headers["content-type"] for headers in model.headers] == ["application/json"]


@pytest.mark.parametrize("name", ["gpt-a,gpt-b", "gpt-a\n", "gpt-\0a", ["gpt-a"], {"a": 1}])
async def test_a_model_name_that_is_several_or_none_is_refused(receiver: OtlpReceiver, model: ModelServer, name: Any) -> None:
    upstream = Upstream("litellm:", None, provider="litellm")  # the agent's choice
    async with proxy(receiver, FixedUpstreams(upstream), limits=Limits(litellm_url=model.url)) as stand:
        for path in ("chat/completions", "messages/count_tokens"):
            status, answer, _ = await stand.post(f"{SCOPE}/v1/{path}", body(path, model=name))
            assert (status, answer["error"]["code"]) == (400, "model_name") and "one model" in answer["error"]["message"]
        assert (await stand.post(f"{SCOPE}/v1/chat/completions", body("chat/completions", model="openai/gpt-a")))[0] == 200
    assert [request["model"] for request in model.requests] == ["openai/gpt-a"]


async def test_a_model_server_itself_is_asked_whatever_it_knows(receiver: OtlpReceiver, model: ModelServer) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url))) as stand:
        asked = body("chat/completions", model="lr=1,bs=2", kv_transfer_params={}, metadata={"a": "b"})
        assert (await stand.post(f"{SCOPE}/v1/chat/completions", asked))[0] == 200
    assert {name: model.requests[0][name] for name in asked} == asked


def test_every_route_has_fields_of_its_own() -> None:
    for path, dialect in DIALECTS.items():
        assert OWN[path] | {"model"} <= dialect.fields, path
        assert dialect.smallest_request.keys() | dialect.extras.keys() | dialect.stream_extras.keys() <= dialect.fields, path
