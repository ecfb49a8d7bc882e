"""Agents with Anthropic's Messages or OpenAI's Responses, a server with chat/completions only, and the real litellm between."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import aiohttp
import openai
import pytest
import pytest_asyncio
from aiohttp import web

from agl_otel.errors import SettingsError
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.litellm import Litellm
from agl_otel.proxy.upstream import FixedUpstreams, Route, Upstream
from agl_otel_hook import conventions
from agl_otel_hook.context import Key
from tests.contract.proxy.stand import HELLO, Stand, proxy
from tests.litellm_environment import litellm_python
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver, Received
from tests.thinking_server import ThinkingServer

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module")]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TOOL = {"name": "weather", "description": "of a city", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
_numbers = itertools.count(1)


class Switched(FixedUpstreams):
    """One pool, and others for some rollouts."""

    def __init__(self, *pool: Upstream) -> None:
        super().__init__(*pool)
        self.others: dict[str, Upstream] = {}

    async def resolve(self, key: Key | None, asked: str | None, conversation: str | None = None) -> Route:
        other = self.others.get(key[0]) if key is not None else None
        return Route([other]) if other is not None else await super().resolve(key, asked)


class Translated:
    """The stand, with a new attempt for each test."""

    def __init__(self, stand: Stand, model: ModelServer, litellm: Litellm, upstreams: Switched) -> None:
        self.stand, self.model, self.litellm, self.upstreams = stand, model, litellm, upstreams
        self.begin()

    def begin(self) -> None:
        fresh = ModelServer()
        self.model.__dict__.update({name: value for name, value in fresh.__dict__.items() if name not in ("url", "_runner", "routes")})
        self.rollout = f"ro-{next(_numbers)}"
        self.base_url = f"{self.stand.url}/rollout/{self.rollout}/attempt/at-1/v1"

    async def spans(self) -> list[Received]:
        await self.stand.until(lambda health: not health["under_way"])  # the agent has its answer a moment before
        return [span for span in await self.stand.calls() if span.key == (self.rollout, "at-1")]

    @contextlib.asynccontextmanager
    async def messages(self, body: dict[str, Any]) -> AsyncGenerator[aiohttp.ClientResponse]:
        """A request as Anthropic's SDK sends it."""
        headers = {"x-api-key": "agl-own", "anthropic-version": "2023-06-01", "traceparent": TRACEPARENT}
        asked = {"model": "claude-any", "max_tokens": 50, **body}
        async with aiohttp.ClientSession() as session, session.post(f"{self.base_url}/messages", json=asked, headers=headers) as answer:
            yield answer


@pytest.fixture(scope="module")
def shared_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module(shared_receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Translated]:
    litellm = Litellm(litellm_python(), tmp_path_factory.mktemp("litellm"))
    model = ModelServer()
    await model.start()
    upstreams = Switched(Upstream(model.url, "served-model", "real-key", {"temperature": 0.25}, "3"))
    with pytest.MonkeyPatch.context() as environment:
        for name, value in (("API_BASE", model.url), ("API_KEY", "key-of-the-environment")):
            environment.setenv(f"HOSTED_VLLM_{name}", value)  # where litellm finds this provider
        async with proxy(shared_receiver, upstreams, litellm=litellm, limits=Limits(silence_seconds=300)) as stand:
            await stand.until(lambda health: health["litellm"] == "up")
            yield Translated(stand, model, litellm, upstreams)
    await model.stop()
    assert litellm.state == "down"


@pytest.fixture
def translated(module: Translated) -> Translated:
    module.begin()
    return module


def check(translated: Translated, span: Received, reply: str, *, call: int = 1, said: Any = None) -> None:
    """Check that the span has the tokens of the chat call as it was sampled."""
    held, asked = span.attributes, translated.model.requests[-1]
    assert held[conventions.LLM_CALL] == call and not span.error, held
    if conventions.LLM_PREFIX_CALL not in held:
        assert held[conventions.LLM_PROMPT_TOKEN_IDS] == translated.model.prompt_ids(asked["messages"])
    assert held[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord(c) for c in reply]
    assert held[conventions.LLM_RESPONSE_LOGPROBS] == [-0.5] * len(reply)
    assert (held[conventions.LLM_MODEL_VERSION], asked["model"], asked["temperature"]) == ("7", "served-model", 0.25)
    assert translated.model.headers[-1]["authorization"] == "Bearer real-key" and "x-api-key" not in translated.model.headers[-1]
    assert held["gen_ai.response.id"] == said and held["gen_ai.operation.name"] == "chat"


async def test_anthropics_messages_are_recorded_as_the_chat_call_that_was_sampled(translated: Translated) -> None:
    async with translated.messages({"system": "be kind", "messages": HELLO}) as answer:
        assert answer.status == 200 and not any(name.lower().startswith("x-litellm") for name in answer.headers)
        said = await answer.json()
    assert said["content"] == [{"type": "text", "text": "olleh:0"}] and said["stop_reason"] == "end_turn"
    assert said["model"] == "claude-any" and "token_ids" not in json.dumps(said)
    (span,) = await translated.spans()
    check(translated, span, "olleh:0", said=said["id"])
    assert span.parent_id == TRACEPARENT.split("-")[2] and span.attributes["gen_ai.request.model"] == "claude-any"
    assert [message["role"] for message in json.loads(span.attributes["gen_ai.input.messages"])] == ["system", "user"]


async def test_a_stream_of_messages_too(translated: Translated) -> None:
    async with translated.messages({"messages": HELLO, "stream": True}) as answer:
        text = await answer.text()
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:")]
    assert [event["type"] for event in events][:2] == ["message_start", "content_block_start"] and events[-1]["type"] == "message_stop"
    assert "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta") == "olleh:0"
    assert events[0]["message"]["model"] == "claude-any"
    (span,) = await translated.spans()
    check(translated, span, "olleh:0", said=events[0]["message"]["id"])


@pytest.mark.parametrize("streamed", [False, True])
async def test_responses_of_openais_sdk_too(translated: Translated, streamed: bool) -> None:
    async with openai.AsyncOpenAI(base_url=translated.base_url, api_key="agl-own", max_retries=0) as client:
        if streamed:
            events = [event async for event in await client.responses.create(model="gpt-any", input="hello", stream=True)]
            (whole,) = [event.response for event in events if event.type == "response.completed"]
        else:
            whole = await client.responses.create(model="gpt-any", input="hello")
    assert (whole.output_text, whole.model) == ("olleh:0", "gpt-any")
    (span,) = await translated.spans()
    check(translated, span, "olleh:0", said=whole.id)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_with_tools_stays_one_prefix(translated: Translated, streamed: bool) -> None:
    translated.model.tool_call = {"name": "weather", "arguments": {"city": "Ulm"}}
    async with translated.messages({"messages": HELLO, "tools": [TOOL], "stream": streamed}) as answer:
        text = await answer.text()
    assert "tool_use" in text and "weather" in text and "Ulm" in text
    (function,) = translated.model.requests[-1]["tools"]
    assert function["function"]["name"] == "weather" and function["function"]["parameters"]["properties"] == {"city": {"type": "string"}}
    translated.model.tool_call = None
    use = {"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Ulm"}}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    said = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "olleh:0"}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "sunny"}, image]},
    ]
    async with translated.messages({"messages": said, "tools": [TOOL]}) as answer:
        assert answer.status == 200, await answer.text()
    roles = [message["role"] for message in translated.model.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "tool", "user"] and "base64,AAAA" in json.dumps(translated.model.requests[-1]["messages"])
    first, second = await translated.spans()
    assert json.loads(first.attributes["gen_ai.output.messages"])[0]["parts"][1]["arguments"] == {"city": "Ulm"}
    assert (second.attributes[conventions.LLM_PREFIX_CALL], second.attributes[conventions.LLM_CALL]) == (1, 2)
    before = first.attributes[conventions.LLM_PROMPT_TOKEN_IDS] + first.attributes[conventions.LLM_RESPONSE_TOKEN_IDS]
    whole = translated.model.prompt_ids(translated.model.requests[-1]["messages"])
    assert before + second.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == whole


async def test_the_servers_error_reaches_the_agent_in_its_own_protocol(translated: Translated) -> None:
    translated.model.status = 500
    async with translated.messages({"messages": HELLO}) as answer:
        said = await answer.json()
        assert answer.status == 500 and said["type"] == "error" and "told to fail" in said["error"]["message"]
    (span,) = await translated.spans()
    assert span.error and span.attributes["http.response.status_code"] == 500 and len(translated.model.requests) == 1


async def test_a_refusal_of_litellm_is_one_failed_call(translated: Translated) -> None:
    async with translated.messages({"messages": "no list"}) as answer:
        assert answer.status >= 400
    (span,) = await translated.spans()
    assert span.error and span.attributes[conventions.LLM_CALL] == 1 and translated.model.requests == []


async def test_a_stream_that_breaks_off_below_is_no_whole_answer_above(translated: Translated) -> None:
    translated.model.break_off_after = 1
    with contextlib.suppress(aiohttp.ClientError):
        async with translated.messages({"messages": HELLO, "stream": True}) as answer:
            assert "message_stop" not in await answer.text()
    (span,) = await translated.spans()
    assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_error"
    assert span.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord("o"), ord("l")]


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_goes_away_ends_the_call_upstream(translated: Translated, streamed: bool) -> None:
    translated.model.hold = asyncio.Event()

    async def agent() -> None:
        async with translated.messages({"messages": HELLO, "stream": streamed}) as answer:
            await answer.read()

    task = asyncio.create_task(agent())
    await translated.model.asked.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await translated.stand.post(f"/rollout/{translated.rollout}/attempt/at-1/close")
    (span,) = await translated.spans()
    assert span.attributes[conventions.LLM_INCOMPLETE] == "client_gone" and translated.model.cancelled == 1


@pytest.mark.parametrize("key", ["key-of-the-resource", None])
@pytest.mark.parametrize("path", ["chat/completions", "messages"])
async def test_a_providers_model_is_called_with_the_resources_or_the_environments_key(
    translated: Translated, path: str, key: str | None
) -> None:
    translated.upstreams.others[translated.rollout] = Upstream("litellm:", "hosted_vllm/far", key, provider="litellm")
    body = {"model": "any", "max_tokens": 50, "messages": HELLO}
    status, answer, _ = await translated.stand.post(f"/rollout/{translated.rollout}/attempt/at-1/v1/{path}", body)
    assert status == 200, answer
    assert translated.model.requests[-1]["model"] == "far" and "api_key" not in translated.model.requests[-1]
    assert translated.model.headers[-1]["authorization"] == f"Bearer {key or 'key-of-the-environment'}"
    (span,) = await translated.spans()
    assert not span.error and "key-of" not in repr(span.attributes)


async def test_an_agent_cannot_send_another_providers_key_to_an_address_of_its_own(translated: Translated) -> None:
    translated.upstreams.others[translated.rollout] = Upstream("litellm:", "hosted_vllm/far", "key-of-the-resource", provider="litellm")
    for extra in (
        {"api_base": translated.model.url},
        {"base_url": translated.model.url},
        {"extra_body": {"api_base": translated.model.url}},
    ):
        body = {"model": "any", "messages": HELLO, **extra}
        async with aiohttp.ClientSession() as session, session.post(f"{translated.base_url}/chat/completions", json=body) as answer:
            assert answer.status >= 400
    assert translated.model.requests == []


@pytest.mark.parametrize(("path", "is_served"), [("chat/completions", True), ("messages", True), ("messages", False), ("responses", False)])
async def test_fields_that_control_litellm_are_refused_and_metadata_removed(translated: Translated, path: str, is_served: bool) -> None:
    """Both if litellm serves the model and if it only translates."""
    if is_served:
        translated.upstreams.others[translated.rollout] = Upstream("litellm:", "hosted_vllm/far", "key-of-the-resource", provider="litellm")
    body = {"model": "any", "max_tokens": 50, "messages": HELLO}
    if path == "responses":
        body = {"model": "any", "input": "hello"}
    url = f"/rollout/{translated.rollout}/attempt/at-1/v1/{path}"
    metadata = {"user_id": "user_of_claude_code", "tags": ["other"], "trace_id": "t"}
    status, answer, _ = await translated.stand.post(url, {**body, "metadata": metadata})
    assert status == 200, answer
    assert "metadata" not in translated.model.requests[-1] and "user_of_claude_code" not in json.dumps(translated.model.requests[-1])
    translated.model.requests.clear()
    for name, value in {
        "mock_response": "made up",
        "fallbacks": ["hosted_vllm/other"],
        "custom_llm_provider": "openai",
        "num_retries": 2,
        "extra_headers": {"x-mine": "1"},
        "drop_params": False,
    }.items():
        status, answer, _ = await translated.stand.post(url, {**body, name: value})
        assert status == 400 and repr(name) in answer["error"]["message"], (name, answer)
    assert translated.model.requests == []
    first, *refused = await translated.spans()
    assert not first.error and all(span.attributes["http.response.status_code"] == 400 for span in refused)


@pytest.mark.parametrize("name", ["hosted_vllm/far,hosted_vllm/near", "hosted_vllm/far\n"])
async def test_a_call_asks_one_model(translated: Translated, name: str) -> None:
    translated.upstreams.others[translated.rollout] = Upstream("litellm:", None, provider="litellm")
    body = {"model": name, "messages": HELLO}
    async with aiohttp.ClientSession() as session, session.post(f"{translated.base_url}/chat/completions", json=body) as answer:
        assert answer.status == 400, await answer.text()
    assert translated.model.requests == []


@pytest.mark.parametrize("provider", ["openai", "litellm"])
@pytest.mark.parametrize("path", ["chat/completions", "messages", "responses"])
async def test_no_redirect_is_followed_below_litellm_either(
    translated: Translated, path: str, provider: Literal["openai", "litellm"]
) -> None:
    came: list[str] = []

    async def take(request: web.Request) -> web.Response:
        came.append(request.path)
        return web.json_response({})

    if provider == "litellm":
        translated.upstreams.others[translated.rollout] = Upstream("litellm:", "hosted_vllm/far", "key-of-the-resource", provider="litellm")
    other = ModelServer({f"/{each}": take for each in ("stolen", "v1/stolen")})
    await other.start()
    translated.model.redirect = other.url.removesuffix("/v1") + "/stolen"
    body = {"model": "any", "input": "hello"} if path == "responses" else {"model": "any", "max_tokens": 50, "messages": HELLO}
    status, answer, _ = await translated.stand.post(f"/rollout/{translated.rollout}/attempt/at-1/v1/{path}", body)
    await other.stop()
    assert status >= 400 and came == [], answer
    if provider == "openai":
        assert "redirects are not followed" in json.dumps(answer)  # litellm takes addresses out of some errors
    assert all(span.error for span in await translated.spans())


async def test_chat_itself_takes_no_way_round(translated: Translated) -> None:
    status, answer, _ = await translated.stand.post(f"/rollout/{translated.rollout}/attempt/at-1/v1/chat/completions", {"messages": HELLO})
    assert status == 200 and answer["id"] == "chatcmpl-1" and len(await translated.spans()) == 1


@contextlib.asynccontextmanager
async def native_server(translated: Translated, *, chat_has_ids: bool) -> AsyncGenerator[ModelServer]:
    """A server that speaks Messages, without token ids; its chat/completions may have them. The test's rollout goes to it."""

    async def native(_: web.Request) -> web.Response:
        said = {"type": "text", "text": "native"}
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "usage": {"input_tokens": 3, "output_tokens": 1}}
        return web.json_response({**head, "content": [said], "stop_reason": "end_turn"})

    server = ModelServer({"/v1/messages": native})
    server.plain = not chat_has_ids
    await server.start()
    translated.upstreams.others[translated.rollout] = Upstream(server.url, "served-model", "real-key")
    try:
        yield server
    finally:
        await server.stop()


async def texts(translated: Translated, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The answers to two calls, the second after the proxy's probe for token ids."""
    said: list[str] = []
    for _ in range(2):
        async with translated.messages({"messages": HELLO}) as answer:
            said.append((await answer.json())["content"][0]["text"])
        await translated.stand.until(lambda _: "chat/completions" in caplog.text)  # what was learnt is logged
    return said


async def test_messages_without_token_ids_go_to_chat_if_that_has_them(translated: Translated, caplog: pytest.LogCaptureFixture) -> None:
    async with native_server(translated, chat_has_ids=True) as server:
        assert await texts(translated, caplog) == ["native", "olleh:0"]
        tried, sampled = server.requests
        assert tried["max_tokens"] == 1 and (tried["model"], server.headers[0]["authorization"]) == ("served-model", "Bearer real-key")
        first, second = await translated.spans()
        assert conventions.LLM_RESPONSE_TOKEN_IDS not in first.attributes
        assert second.attributes[conventions.LLM_RESPONSE_TOKEN_IDS] == [ord(c) for c in "olleh:0"]
        assert sampled["messages"][-1]["content"] == "hello"


async def test_messages_stay_untranslated_if_chat_has_no_token_ids_either(translated: Translated, caplog: pytest.LogCaptureFixture) -> None:
    async with native_server(translated, chat_has_ids=False) as server:
        assert await texts(translated, caplog) == ["native", "native"]
        assert len(server.requests) == 1, "asked once"


async def test_a_litellm_that_ends_is_started_again_and_the_call_waits_for_it(translated: Translated) -> None:
    os.kill(translated.litellm.pid, signal.SIGKILL)
    await translated.stand.until(lambda health: health["litellm"] == "starting")
    async with translated.messages({"messages": HELLO}) as answer:
        while answer.status == 503:  # a busy machine: it says when to come back
            assert "AGL_LITELLM" in await answer.text() and answer.headers["retry-after"] == "1"
            await translated.stand.until(lambda health: health["litellm"] == "up")
            break
    async with translated.messages({"messages": HELLO}) as answer:
        assert answer.status == 200, await answer.text()


async def test_a_litellm_that_cannot_be_started_says_so(shared_receiver: OtlpReceiver, tmp_path: Path) -> None:
    async def native(_: web.Request) -> web.Response:
        return web.json_response({"type": "message"})

    model = ModelServer({"/v1/messages": native})
    await model.start()
    litellm = Litellm(sys.executable, tmp_path)  # has no litellm
    always = Limits(translate="always")
    async with proxy(shared_receiver, FixedUpstreams(Upstream(model.url)), litellm=litellm, limits=always) as stand:
        status, answer, headers = await stand.post("/rollout/ro-down/attempt/at-1/v1/messages", {"model": "m", "messages": HELLO})
        assert (status, answer["error"]["code"], headers["retry-after"]) == (503, "litellm_down", "1")
        assert "litellm.log" in answer["error"]["message"] and "exit code 1" in answer["error"]["message"]
        (span,) = [span for span in await stand.calls() if span.key[0] == "ro-down"]
        assert span.error and span.attributes["http.response.status_code"] == 503
    await model.stop()
    with pytest.raises(SettingsError, match="AGL_LITELLM"):
        Litellm(str(tmp_path), tmp_path)


@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_without_litellm_the_error_names_the_remedy(shared_receiver: OtlpReceiver, path: str) -> None:
    model = ModelServer()
    await model.start()
    async with proxy(shared_receiver, FixedUpstreams(Upstream(model.url))) as stand:
        for _ in range(2):
            status, answer, _ = await stand.post(f"/rollout/ro-{path}/attempt/at-1/v1/{path}", {"model": "m", "messages": HELLO})
            assert (status, answer["error"]["code"]) == (501, "no_litellm") and "AGL_LITELLM=" in answer["error"]["message"]
        spans = [span for span in await stand.calls() if span.key[0] == f"ro-{path}"]
        assert [(span.error, span.attributes[conventions.LLM_CALL]) for span in spans] == [(True, 1), (True, 2)]
    await model.stop()


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", ["messages", "responses"])
async def test_a_bridged_conversation_continues_in_the_agents_protocol(translated: Translated, path: str, streamed: bool) -> None:
    async with ThinkingServer() as server:
        translated.upstreams.others[translated.rollout] = Upstream(server.url, "policy", "key", bridge="keep")
        said: list[Any] = [{"role": "user", "content": "first"}]
        for turn in range(3):
            answer = await (anthropics if path == "messages" else openais)(translated, said, streamed)
            said += [*answer, {"role": "user", "content": f"question {turn}"}]
        spans = await translated.spans()
    bridges = [json.loads(span.attributes.get(conventions.LLM_BRIDGE, "{}")) for span in spans]
    assert [bridge.get("refused") for bridge in bridges] == [None, None, None]
    for (prompt, reply), (later, _) in itertools.pairwise(server.sampled):
        assert later[: len(prompt) + len(reply)] == prompt + reply


async def anthropics(translated: Translated, said: list[Any], streamed: bool) -> list[Any]:
    """Ask as Anthropic's SDK does; return the answer's blocks as an agent gives them back."""
    async with translated.messages({"messages": said, "stream": streamed}) as answer:
        text = await answer.text()
    assert answer.status == 200, text
    if not streamed:
        return [{"role": "assistant", "content": json.loads(text)["content"]}]
    blocks: list[Any] = []
    for event in [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data:")]:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            for name in ("text", "thinking"):
                if name in event["delta"]:
                    blocks[-1][name] = blocks[-1].get(name, "") + event["delta"][name]
    return [{"role": "assistant", "content": blocks}]


async def openais(translated: Translated, said: list[Any], streamed: bool) -> list[Any]:
    """Ask in the Responses protocol; return the answer's items as an agent gives them back."""
    async with openai.AsyncOpenAI(base_url=translated.base_url, api_key="agl-own", max_retries=0) as client:
        if streamed:
            events = [event async for event in await client.responses.create(model="gpt-any", input=said, stream=True)]
            (whole,) = [event.response for event in events if event.type == "response.completed"]
        else:
            whole = await client.responses.create(model="gpt-any", input=said)
    return [item.model_dump(exclude_none=True) for item in whole.output]
