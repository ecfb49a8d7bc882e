"""Agents that speak Google's generateContent, and a server with chat/completions: without litellm, and recorded as that call."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from agl_otel.net.auth import attempt_key
from agl_otel.proxy.models import ModelList
from agl_otel.proxy.upstream import FixedUpstreams, ListedUpstreams, Upstream
from agl_otel.types.sampling import Contract
from agl_otel_hook import conventions
from tests.contract.proxy.stand import KEY, SCOPE, Stand, proxy
from tests.environments import AbsentError, installed
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver
from tests.thinking_server import ThinkingServer

ASKED: dict[str, Any] = {
    "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
    "systemInstruction": {"parts": [{"text": "be"}, {"text": "kind"}]},
    "generationConfig": {"temperature": 0.5, "topP": 0.9, "topK": 40, "maxOutputTokens": 9, "thinkingConfig": {"includeThoughts": True}},
    "safetySettings": [],
}
SDK = ("google-genai==3.6.1",)
LISTS = """
import json, sys
from google import genai

url, key, version, name = sys.argv[1:]
options = {"base_url": url} | ({"api_version": version} if version else {})
right, wrong = (genai.Client(api_key=each, http_options=options) for each in (key, "wrong"))
found = {"listed": [each.name for each in right.models.list(config={"page_size": 1})], "got": right.models.get(model=name).name}
for client, model in ((right, "absent"), (wrong, name)):
    try:
        client.models.get(model=model)
    except genai.errors.ClientError as error:
        found[model] = [error.code, error.status]
print(json.dumps(found))
"""
DECLARED = {"name": "f", "description": "d", "parameters": {"type": "OBJECT", "properties": {"x": {"type": "STRING"}}}}


async def ask(stand: Stand, body: Any, *, streamed: bool = False, key: str = "dummy", in_query: bool = False) -> tuple[int, Any]:
    """Ask as Google's SDKs do; return status and answer, of a stream its events."""
    method = "streamGenerateContent" if streamed else "generateContent"
    query = ({"alt": "sse"} if streamed else {}) | ({"key": key} if in_query else {})
    headers = {} if in_query else {"x-goog-api-key": key}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stand.url}{SCOPE}/v1beta/models/any/gem:{method}", json=body, headers=headers, params=query) as answer,
    ):
        text = await answer.text()
        is_stream = answer.content_type == "text/event-stream"
    events = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    return answer.status, events if is_stream else json.loads(text)


async def test_a_whole_answer_is_sampled_by_chat_completions_and_recorded_exactly(stand: Stand, model: ModelServer) -> None:
    status, answer = await ask(stand, ASKED)
    (sent,) = model.requests
    assert sent["messages"] == [{"role": "system", "content": "be\nkind"}, {"role": "user", "content": "hello"}]
    assert [sent[name] for name in ("model", "temperature", "top_p", "top_k", "max_tokens")] == ["served-model", 0.5, 0.9, 40, 9]
    assert "x-goog-api-key" not in model.headers[0] and model.headers[0]["authorization"] == "Bearer real-key"
    reply = model.reply(sent["messages"], 0)
    (candidate,) = answer["candidates"]
    assert status == 200 and candidate == {"content": {"role": "model", "parts": [{"text": reply}]}, "index": 0, "finishReason": "STOP"}
    assert answer["usageMetadata"] == {"promptTokenCount": 3, "candidatesTokenCount": len(reply), "totalTokenCount": 3 + len(reply)}
    (span,) = await stand.calls()
    held = span.attributes
    assert (
        held[conventions.LLM_PROMPT_TOKEN_IDS] == model.prompt_ids(sent["messages"]) and held["gen_ai.response.id"] == answer["responseId"]
    )
    assert held[conventions.LLM_RESPONSE_TOKEN_IDS] == list(map(ord, reply)) and conventions.LLM_RESPONSE_LOGPROBS in held
    assert held["gen_ai.request.temperature"] == 0.5 and not span.error


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
@pytest.mark.parametrize("by", ["path", "baggage"])
async def test_every_version_of_its_routes_is_served(stand: Stand, model: ModelServer, version: str, by: str) -> None:
    baggage = f"{conventions.ROLLOUT_ID}={KEY[0]},{conventions.ATTEMPT_ID}={KEY[1]}"
    scope, headers = (SCOPE, {}) if by == "path" else ("", {"baggage": baggage})
    status, answer, _ = await stand.post(f"{scope}/{version}/models/any/gem:generateContent", ASKED, **headers)
    (span,) = await stand.calls()
    assert status == 200 and span.attributes["gen_ai.response.id"] == answer["responseId"]
    async with aiohttp.ClientSession() as session, session.get(f"{stand.url}{scope}/v1/models", headers=headers) as listed:
        assert (await listed.json())["object"] == "list", "OpenAI's"


async def test_a_stream_has_its_text_in_pieces(stand: Stand, model: ModelServer) -> None:
    status, events = await ask(stand, ASKED, streamed=True)
    (sent,) = model.requests
    assert status == 200 and sent["stream"] is True and sent["stream_options"] == {"include_usage": True}
    text = "".join(part["text"] for event in events for part in event["candidates"][0]["content"]["parts"])
    assert text == model.reply(sent["messages"], 0)
    assert [event["candidates"][0].get("finishReason") for event in events] == [None, None, "STOP"]
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == model.prompt_ids(sent["messages"]) and not span.error
    assert conventions.LLM_RESPONSE_LOGPROBS in span.attributes and conventions.LLM_INCOMPLETE not in span.attributes


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_tool_is_called_and_answered(stand: Stand, model: ModelServer, streamed: bool) -> None:
    model.tool_call = {"name": "f", "arguments": {"x": "ü"}}
    asked = {**ASKED, "tools": [{"functionDeclarations": [DECLARED]}], "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}}}
    _, answer = await ask(stand, asked, streamed=streamed)
    function = model.requests[0]["tools"][0]["function"]
    assert (
        function["parameters"] == {"type": "object", "properties": {"x": {"type": "string"}}} and model.requests[0]["tool_choice"] == "auto"
    )
    said = [part for each in (answer if streamed else [answer]) for part in each["candidates"][0]["content"]["parts"]]
    (call,) = [part["functionCall"] for part in said if "functionCall" in part]
    assert (call["name"], call["args"]) == ("f", {"x": "ü"}) and call["id"]
    answered = {"functionResponse": {"id": call["id"], "name": "f", "response": {"output": "fine"}}}
    more = [{"role": "model", "parts": said}, {"role": "user", "parts": [{"text": "and"}, answered]}]
    await ask(stand, {**asked, "contents": [*ASKED["contents"], *more]}, streamed=streamed)
    sent = model.requests[1]["messages"][-3:]
    text = "".join(part["text"] for part in said if "text" in part)
    assert sent[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "ü"}'} and sent[0]["content"] == text
    assert sent[1:] == [{"role": "tool", "tool_call_id": call["id"], "content": "fine"}, {"role": "user", "content": "and"}]


@pytest.mark.parametrize("streamed", [False, True])
async def test_arguments_that_are_no_json_are_a_malformed_call(stand: Stand, model: ModelServer, streamed: bool) -> None:
    model.tool_call = {"name": "f", "arguments": {"x": float("inf")}}
    _, answer = await ask(stand, {**ASKED, "tools": [{"functionDeclarations": [DECLARED]}]}, streamed=streamed)
    (candidate,) = (answer[-1] if streamed else answer)["candidates"]
    assert candidate["finishReason"] == "MALFORMED_FUNCTION_CALL" and "Infinity" in candidate["finishMessage"]


@pytest.mark.parametrize(("budget", "differing"), [(0, ("thinking_budget",)), (512, ("thinking_budget",)), (-1, ())])
async def test_a_budget_of_thinking_is_recorded_as_changing_what_is_sampled(
    stand: Stand, model: ModelServer, budget: int, differing: tuple[str, ...]
) -> None:
    status, _ = await ask(stand, {**ASKED, "generationConfig": {"thinkingConfig": {"thinkingBudget": budget}}})
    (span,) = await stand.calls()
    contract = Contract.loads(str(span.attributes.get(conventions.LLM_SAMPLING, "{}")))
    assert status == 200 and model.requests[0].get("thinking_budget", -1) == budget
    assert contract is not None and tuple(name for name in contract.differing({}) if name in contract.agent) == differing


@pytest.mark.parametrize("streamed", [False, True])
async def test_errors_of_the_model_server_have_googles_form(stand: Stand, model: ModelServer, streamed: bool) -> None:
    model.status = 429
    status, answer = await ask(stand, ASKED, streamed=streamed)
    assert status == 429 and answer["error"]["code"] == 429 and answer["error"]["status"] == "RESOURCE_EXHAUSTED"
    assert isinstance(answer["error"]["message"], str)


async def test_a_stream_that_breaks_off_does_not_look_whole(stand: Stand, model: ModelServer) -> None:
    model.break_off_after = 1
    with pytest.raises((aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
        await ask(stand, ASKED, streamed=True)
    (span,) = await stand.calls()
    assert span.attributes[conventions.LLM_INCOMPLETE] == "upstream_error"


@pytest.mark.parametrize(
    ("path", "body", "why"),
    [
        ("any:generateContent", {"contents": [{"role": "judge", "parts": []}]}, "the role of a content"),
        (
            "any:generateContent",
            {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": {}}}]}]},
            "answers no functionCall",
        ),
        ("any:generateContent", {"contents": "x", "tools": [{"googleSearch": {}}]}, "'googleSearch' is Google's own"),
        ("any:generateContent", {"contents": "x", "cachedContent": "c"}, "cachedContent is not available"),
        ("any:generateContent", {"contents": [{"parts": [{"inlineData": {"mimeType": "audio/wav"}}]}]}, "not 'audio/wav'"),
        ("any:generateContent", {"contents": "x", "toolConfig": {"functionCallingConfig": {"mode": ["ANY"]}}}, "not ['ANY']"),
        ("any:streamGenerateContent", {"contents": "x"}, "add ?alt=sse"),
        ("any:embedContent", {"content": "x"}, "has no :embedContent"),
        ("any:countTokens", {"contents": "x", "cachedContent": "c"}, "cachedContent"),
        ("any:countTokens", {"contents": "x", "generateContentRequest": {"contents": "y"}}, "not both"),
    ],
)
async def test_what_cannot_be_asked_of_a_model_server_is_refused(stand: Stand, model: ModelServer, path: str, body: Any, why: str) -> None:
    status, answer, _ = await stand.post(f"{SCOPE}/v1beta/models/{path}", body)
    assert status == 400 and answer["error"]["status"] == "INVALID_ARGUMENT" and not model.requests
    assert why in answer["error"]["message"]


async def test_the_key_of_an_attempt_is_taken_from_googles_header(receiver: OtlpReceiver, model: ModelServer) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "served")), token="secret") as stand:
        status, answer = await ask(stand, ASKED)
        assert status == 401 and answer["error"]["status"] == "UNAUTHENTICATED"
        status, _ = await ask(stand, ASKED, key=attempt_key("secret", *KEY))
        assert status == 200 and "secret" not in str(model.headers[0]) and "authorization" not in model.headers[0]


async def test_the_key_of_an_attempt_is_taken_from_the_path_and_kept_nowhere(
    receiver: OtlpReceiver, model: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    key = attempt_key("secret", *KEY)
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "served")), token="secret") as stand:
        assert (await ask(stand, ASKED, key="wrong", in_query=True))[0] == 401
        for streamed in (False, True):
            assert (await ask(stand, ASKED, streamed=streamed, key=key, in_query=True))[0] == 200
        assert (await stand.post(f"{SCOPE}/v1/chat/completions?key={key}", {"messages": []}))[0] == 401, "Google's protocol only"
        spans = await stand.calls()
    assert len(spans) == 2 and key not in str([vars(span) for span in spans])
    assert key not in str(model.headers) and key not in caplog.text and key not in str(model.requests)


async def test_tokens_are_counted_as_the_model_servers_template_writes_them(receiver: OtlpReceiver) -> None:
    asked = {**ASKED, "tools": [{"functionDeclarations": [DECLARED]}]}
    async with ThinkingServer() as server, proxy(receiver, FixedUpstreams(Upstream(server.url, "policy"))) as stand:
        path = f"{SCOPE}/v1beta/models/gem:countTokens"
        status, whole, _ = await stand.post(path, {"generateContentRequest": {"model": "models/gem", **asked}})
        status_alone, alone, _ = await stand.post(path, {"contents": asked["contents"]})
        await ask(stand, asked)
        assert len(await stand.calls()) == 1, "no model call"
    messages = [{"role": "system", "content": "be\nkind"}, {"role": "user", "content": "hello"}]
    assert (status, status_alone) == (200, 200)
    assert whole == {"totalTokens": len(server.sampled[0][0])}
    assert alone == {"totalTokens": len(server.render(messages[1:]))}


async def test_tokens_that_no_server_counts_are_an_error_of_googles(stand: Stand) -> None:
    status, answer, _ = await stand.post(f"{SCOPE}/v1beta/models/gem:countTokens", {"contents": "x"})
    assert status == 501 and answer["error"]["status"] == "UNIMPLEMENTED" and "/tokenize" in answer["error"]["message"]


async def test_validated_calls_are_held_to_their_schemas_and_recorded_so(stand: Stand, model: ModelServer) -> None:
    mode = {"toolConfig": {"functionCallingConfig": {"mode": "VALIDATED"}}}
    assert (await ask(stand, {**ASKED, **mode, "tools": [{"functionDeclarations": [DECLARED]}]}))[0] == 200
    (sent,) = model.requests
    assert sent["tool_choice"] == "auto" and sent["tools"][0]["function"]["strict"] is True
    (span,) = await stand.calls()
    contract = Contract.loads(str(span.attributes[conventions.LLM_SAMPLING]))
    assert contract is not None and contract.agent["strict_tools"] is True and "strict_tools" in contract.differing({})


async def get(url: str, **headers: str) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("scope", [SCOPE, ""])
@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
async def test_models_are_listed_and_described_in_googles_form(stand: Stand, scope: str, version: str) -> None:
    card = {"name": "models/m", "displayName": "m", "supportedGenerationMethods": ["generateContent", "countTokens"]}
    url = f"{stand.url}{scope}/{version}/models"
    key = {"x-goog-api-key": "dummy"}
    assert await get(url, **key) == await get(f"{url}?key=dummy&pageSize=1") == (200, {"models": [card]})
    assert await get(f"{url}/m", **key) == await get(f"{url}/m?key=dummy") == (200, card)
    status, answer = await get(f"{url}/any/gem", **key)
    assert status == 404 and answer["error"]["status"] == "NOT_FOUND" and "'any/gem'" in answer["error"]["message"]
    assert await stand.calls() == [], "no model calls"


async def test_what_openais_clients_ask_of_models_stays_openais(stand: Stand) -> None:
    status, answer = await get(f"{stand.url}{SCOPE}/v1/models")
    assert status == 200 and answer["object"] == "list"
    status, answer = await get(f"{stand.url}{SCOPE}/v1/models/m")
    assert status == 404 and answer["error"]["code"] == "not_found", "it is no route of ours"


async def test_models_of_the_proxys_own_list_are_those_that_it_serves(receiver: OtlpReceiver, model: ModelServer) -> None:
    params = {"model": "hosted_vllm/local", "api_base": model.url}
    models = ModelList([{"model_name": name, "litellm_params": params} for name in ("policy", "claude-*")])
    async with proxy(receiver, ListedUpstreams(models), models=models) as stand:
        url = f"{stand.url}/v1beta/models"
        listed = (await get(url))[1]["models"]
        assert [each["name"] for each in listed] == ["models/policy", "models/claude-*"]
        assert (await get(f"{url}/policy"))[1] == listed[0] and (await get(f"{url}/claude-9"))[1]["name"] == "models/claude-9"
        assert (await get(f"{url}/other"))[0] == 404


@pytest.mark.parametrize("path", ["", "/m"])
async def test_the_list_of_models_has_the_key_rules_of_calls(receiver: OtlpReceiver, model: ModelServer, path: str) -> None:
    key = attempt_key("secret", *KEY)
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "served")), token="secret") as stand:
        of_attempt, of_none = (f"{stand.url}{scope}/v1beta/models{path}" for scope in (SCOPE, ""))
        for url, shown in ((of_attempt, "wrong"), (of_attempt, ""), (of_none, key)):
            status, answer = await get(url, **{"x-goog-api-key": shown})
            assert status == 401 and answer["error"]["status"] == "UNAUTHENTICATED", url
        assert [(await get(url, **{"x-goog-api-key": shown}))[0] for url, shown in ((of_attempt, key), (of_none, "secret"))] == [200, 200]


@pytest.mark.parametrize("path", ["", "/m"])
async def test_errors_of_the_list_of_models_have_googles_form(stand: Stand, model: ModelServer, path: str) -> None:
    url = f"{stand.url}{SCOPE}/v1beta/models{path}"
    await model.stop()
    status, answer = await get(url)
    assert status == 502 and answer["error"]["status"] == "INTERNAL" and "cannot be reached" in answer["error"]["message"]
    await stand.close()
    status, answer = await get(url)
    assert status == 410 and answer["error"]["status"] == "FAILED_PRECONDITION"


@pytest.mark.full  # an environment of its own
@pytest.mark.parametrize("version", ["", "v1beta", "v1alpha"])
async def test_googles_sdk_lists_the_models_and_gets_one(receiver: OtlpReceiver, model: ModelServer, version: str) -> None:
    try:
        python = installed("google-genai", SDK) / "bin" / "python"
    except AbsentError as absent:
        pytest.skip(str(absent))
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, "served")), token="secret") as stand:
        for scope, key in ((SCOPE, attempt_key("secret", *KEY)), ("", "secret")):
            run = await asyncio.create_subprocess_exec(
                python, "-c", LISTS, stand.url + scope, key, version, "m", stdout=asyncio.subprocess.PIPE
            )
            out, _ = await run.communicate()
            found = {"listed": ["models/m"], "got": "models/m", "absent": [404, "NOT_FOUND"], "m": [401, "UNAUTHENTICATED"]}
            assert json.loads(out) == found
