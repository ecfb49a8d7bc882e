"""Several endpoints, pauses, budgets, keys, retries, the model list."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest

from agl_otel.algorithms.verl.publish import sampling_by_mode
from agl_otel.compat.llm_proxy import LLMProxy
from agl_otel.errors import ModelServerError, UnavailableError, UsageError
from agl_otel.net.auth import attempt_key, shared_key
from agl_otel.proxy.budget import Budget
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.models import ModelList
from agl_otel.proxy.upstream import FixedUpstreams, ListedUpstreams, Route, Upstream, call_seed
from agl_otel.types import Describe, ProxyLLM
from agl_otel.types.sampling import NEUTRAL, all_parameters
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, KEY, SCOPE, Stand, ask, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

CHAT = f"{SCOPE}/v1/chat/completions"
BODY = {"model": "m", "messages": HELLO}


async def test_a_rollout_stays_at_its_endpoint_and_moves_when_that_is_down(receiver: OtlpReceiver, model: ModelServer) -> None:
    other = ModelServer()
    await other.start()
    servers = {model.url: model, other.url: other}
    async with proxy(receiver, FixedUpstreams(*(Upstream(url) for url in servers))) as stand:
        for _ in range(3):
            await ask(stand.client())
        own = next(server for server in servers.values() if server.requests)
        spare = next(server for server in servers.values() if server is not own)
        assert (len(own.requests), len(spare.requests)) == (3, 0)
        await own.stop()
        await ask(stand.client())
        await ask(stand.client())
        assert len(spare.requests) == 2
        spans = await stand.calls()
        assert [span.attributes.get(conventions.LLM_TRIES) for span in spans[:4]] == [None, None, None, 2]
        assert [span.attributes[conventions.LLM_CALL] for span in spans] == [1, 2, 3, 4, 5]
    await spare.stop()


async def test_an_endpoint_that_cannot_serve_is_skipped_for_another(receiver: OtlpReceiver, model: ModelServer) -> None:
    other = ModelServer()
    await other.start()
    model.status = other.status = 503
    async with proxy(receiver, FixedUpstreams(Upstream(model.url), Upstream(other.url))) as stand:
        status, answer, _ = await stand.post(CHAT, BODY)
        assert (status, answer["error"]["message"]) == (503, "told to fail") and len(model.requests) + len(other.requests) == 3
        other.status = 200
        assert (await stand.post(CHAT, BODY))[0] == 200
    await other.stop()


DEFAULTS = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "frequency_penalty": 0.2,
    "presence_penalty": 0.3,
}  # fmt: skip
"""Of a model server, by its model's generation_config.json."""


@pytest.mark.parametrize("asked", [{}, {"temperature": None, "top_p": None, "top_k": None}])
async def test_a_model_servers_defaults_do_not_override_sampling_parameters(
    receiver: OtlpReceiver, model: ModelServer, asked: dict[str, Any]
) -> None:
    val = SimpleNamespace(temperature=0.0, top_p=1.0, top_k=-1)
    verl: Any = SimpleNamespace(response_length=64, temperature=0.8, top_p=1.0, top_k=-1, val_kwargs=val)
    model.defaults = DEFAULTS
    for sampling in (all_parameters(0.8, 64), sampling_by_mode(verl)["train"]):
        async with proxy(receiver, FixedUpstreams(Upstream(model.url, sampling=sampling))) as stand:
            assert (await stand.post(CHAT, {**BODY, **asked}))[0] == 200
            assert (await stand.calls())[-1].attributes["gen_ai.request.temperature"] == 0.8
    assert model.sampled_with == [{**NEUTRAL, "temperature": 0.8}] * 2


async def test_what_the_agent_asks_for_itself_is_what_is_sampled_and_stored(receiver: OtlpReceiver, model: ModelServer) -> None:
    model.defaults = DEFAULTS
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, sampling=all_parameters(1.0, 64)))) as stand:
        assert (await stand.post(CHAT, {**BODY, "temperature": 0.2, "top_p": 0.5}))[0] == 200
        (call,) = await stand.calls()
    assert model.sampled_with == [{**NEUTRAL, "temperature": 0.2, "top_p": 0.5}]
    assert [call.attributes[f"gen_ai.request.{name}"] for name in ("temperature", "top_p")] == [0.2, 0.5]


async def test_after_the_first_byte_no_other_endpoint_is_tried(receiver: OtlpReceiver, model: ModelServer) -> None:
    other = ModelServer()
    model.break_off_after = other.break_off_after = 1
    await other.start()
    async with proxy(receiver, FixedUpstreams(Upstream(model.url), Upstream(other.url))) as stand:
        async with aiohttp.ClientSession() as session, session.post(f"{stand.url}{CHAT}", json={**BODY, "stream": True}) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        (span,) = await stand.calls()
        assert span.attributes[conventions.LLM_INCOMPLETE] == "upstream_error" and conventions.LLM_TRIES not in span.attributes
    assert len(model.requests) + len(other.requests) == 1
    await other.stop()


async def test_calls_held_while_weights_are_replaced_have_the_new_version(stand: Stand, model: ModelServer) -> None:
    model.version, model.hold = None, asyncio.Event()
    first = asyncio.create_task(ask(stand.client()))
    await model.asked.wait()
    assert (await stand.post("/pause", {"mode": "hold", "wait_seconds": 0}))[1] == {"paused": "hold", "under_way": 1}
    pausing = asyncio.create_task(stand.post("/pause", {"mode": "hold", "wait_seconds": 60}))
    second = asyncio.create_task(ask(stand.client()))
    await stand.until(lambda health: health["held"] == 1)
    model.hold.set()
    await first
    assert (await pausing)[1]["under_way"] == 0 and not second.done() and len(model.requests) == 1
    assert (await stand.post("/resume", {"version": 12}))[1] == {"paused": None, "version": "12"}
    await second
    assert [span.attributes[conventions.LLM_MODEL_VERSION] for span in await stand.calls()] == ["3", "12"]


async def test_a_pause_that_refuses_is_a_429_that_sdks_retry(stand: Stand, model: ModelServer) -> None:
    await stand.post("/pause", {"mode": "refuse", "wait_seconds": 0})
    status, answer, headers = await stand.post(CHAT, BODY)
    assert (status, headers["retry-after"], answer["error"]["code"]) == (429, "1", "paused")
    retrying = asyncio.create_task(ask(stand.client().with_options(max_retries=5)))
    await stand.post("/resume")
    assert (await retrying).choices[0].message.content == "olleh:0"
    assert [span.attributes[conventions.LLM_CALL] for span in await stand.calls()] == [1]


@pytest.mark.parametrize(
    ("body", "words"), [({"mode": "later"}, "hold"), ({"wait_seconds": "x"}, "wait_seconds"), ({"wait_seconds": math.nan}, "wait_seconds")]
)
async def test_an_invalid_pause_is_answered_with_what_is_valid(stand: Stand, body: dict[str, Any], words: str) -> None:
    status, answer, _ = await stand.post("/pause", body)
    assert status == 400 and words in answer["error"]["message"]


@pytest.mark.parametrize(("budget", "calls", "words"), [(Budget(calls=2), 2, "2 of 2 calls"), (Budget(tokens=10), 2, "14 of 10 tokens")])
async def test_an_attempt_gets_no_more_than_its_budget(
    receiver: OtlpReceiver, model: ModelServer, budget: Budget, calls: int, words: str
) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url)), limits=Limits(budget=budget)) as stand:
        for _ in range(calls):
            assert (await stand.post(CHAT, BODY))[0] == 200
        status, answer, _ = await stand.post(CHAT, BODY)
        assert (status, answer["error"]["code"], words in answer["error"]["message"]) == (403, "budget", True)
        assert (await stand.post("/rollout/ro-1/attempt/at-2/chat/completions", BODY))[0] == 200
        assert (await stand.close())["spans"] == calls


async def test_an_agent_cannot_write_into_anothers_attempt(receiver: OtlpReceiver, model: ModelServer) -> None:
    own, foreign, shared = attempt_key("secret", "ro-1", "at-1"), attempt_key("secret", "ro-2", "at-2"), shared_key("secret")
    baggage = f"{conventions.ROLLOUT_ID}=ro-1,{conventions.ATTEMPT_ID}=at-1"
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, api_key="real")), token="secret") as stand:
        for path, headers, status in (
            (CHAT, {"authorization": f"Bearer {own}"}, 200),
            (CHAT, {"x-api-key": own}, 200),
            (CHAT, {"authorization": f"Bearer {foreign}"}, 401),
            (CHAT, {}, 401),
            (f"{SCOPE}/v1/models", {"authorization": f"Bearer {foreign}"}, 405),
            ("/v1/chat/completions", {"authorization": f"Bearer {own}", "baggage": baggage}, 401),
            ("/v1/chat/completions", {"authorization": f"Bearer {shared}", "baggage": baggage}, 200),
            ("/v1/chat/completions", {"authorization": f"Bearer {foreign}"}, 401),
            ("/v1/chat/completions", {"authorization": "Bearer sk-mine"}, 401),
            ("/v1/chat/completions", {"authorization": "Bearer secret"}, 200),
            ("/pause", {"authorization": f"Bearer {shared}"}, 401),
            ("/model_list", {"authorization": f"Bearer {own}"}, 401),
        ):
            assert (await stand.post(path, BODY, **headers))[0] == status, (path, headers)
    given = [headers.get("authorization") for headers in model.headers]
    assert given == ["Bearer real", "Bearer real", "Bearer real", "Bearer real"]
    assert not any("x-api-key" in headers for headers in model.headers)


async def test_extra_headers_and_body_fields_of_a_resource_are_sent_by_the_proxy(receiver: OtlpReceiver, model: ModelServer) -> None:
    """Agents do not get them: they contain a provider's keys (runner/environment.py)."""
    sampling = {"extra_headers": {"X-Api-Key": "theirs", "x-number": 5}, "extra_body": {"min_p": 0.1}, "temperature": 0.5}
    async with proxy(receiver, FixedUpstreams(Upstream(model.url, api_key="real", sampling=sampling)), token="secret") as stand:
        own = {"authorization": f"Bearer {attempt_key('secret', *KEY)}", "x-api-key": "the agent's"}
        assert (await stand.post(CHAT, BODY, **own))[0] == 200
        assert [(headers["authorization"], headers["x-api-key"]) for headers in model.headers] == [("Bearer real", "theirs")]
        (sent,) = model.requests
        assert (sent["min_p"], sent["temperature"], "extra_headers" in sent, "extra_body" in sent) == (0.1, 0.5, False, False)
        assert "theirs" not in repr(await stand.calls())
    with_password = Upstream(model.url.replace("//", "//u:p@"), sampling={"extra_headers": {"Authorization": "theirs"}})
    async with proxy(receiver, FixedUpstreams(with_password)) as stand:
        assert (await stand.post(CHAT, BODY))[0] == 200
        assert model.headers[-1]["authorization"].startswith("Basic ")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_a_key_of_ours_never_reaches_a_provider(receiver: OtlpReceiver, model: ModelServer, scheme: str) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url)), token="secret") as stand:
        assert (await stand.post(CHAT, BODY, authorization=f"{scheme} {attempt_key('secret', 'ro-1', 'at-1')}"))[0] == 200
    assert "authorization" not in model.headers[0]


async def test_a_key_of_ours_in_a_second_header_does_not_either(receiver: OtlpReceiver, model: ModelServer) -> None:
    async with proxy(receiver, FixedUpstreams(Upstream(model.url))) as stand:
        given = [("authorization", "Bearer sk-own"), ("authorization", f"Bearer {shared_key('secret')}")]
        async with aiohttp.ClientSession(headers=given) as session, session.post(f"{stand.url}{CHAT}", json=BODY) as answer:
            assert answer.status == 200
    assert not any("authorization" in headers for headers in model.headers)


async def test_a_retry_of_an_sdk_is_linked(stand: Stand, model: ModelServer) -> None:
    model.status = 500
    retrying = asyncio.create_task(ask(stand.client().with_options(max_retries=3)))
    await model.asked.wait()
    await stand.until(lambda health: health["counts"].get("failed", 0) > 0)
    model.status = 200
    await retrying
    await ask(stand.client())
    first, *repeated, fresh = await stand.calls()
    assert first.error and conventions.LLM_RETRY not in first.attributes
    for number, span in enumerate(repeated, 1):
        assert (span.attributes[conventions.LLM_RETRY], span.attributes[conventions.LLM_RETRY_OF]) == (number, number)
    assert conventions.LLM_RETRY_OF not in fresh.attributes and repeated


class Seeded(FixedUpstreams):
    """For a rollout with a seed."""

    async def resolve(self, key: tuple[str, str] | None, asked: str | None, conversation: str | None = None) -> Route:
        return replace(await super().resolve(key, asked), seed=7)


async def test_a_retry_of_an_sdk_samples_with_the_seed_of_the_failed_try(receiver: OtlpReceiver, model: ModelServer) -> None:
    async with proxy(receiver, Seeded(Upstream(model.url))) as stand:
        model.status = 500
        retrying = asyncio.create_task(ask(stand.client().with_options(max_retries=3)))
        await model.asked.wait()
        await stand.until(lambda health: health["counts"].get("failed", 0) > 0)
        model.status = 200
        await retrying
        await ask(stand.client())
    *tries, fresh = [request["seed"] for request in model.requests]
    assert len(tries) > 1 and set(tries) == {call_seed(7, 1)}
    assert fresh == call_seed(7, 2), "what follows an outage is drawn as without one"


async def test_a_retry_after_a_timeout_of_the_sdk_is_linked_too(stand: Stand, model: ModelServer) -> None:
    model.hold = asyncio.Event()
    async with stand.client() as client:
        messages: Any = HELLO
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=2.0, max_retries=1).chat.completions.create(model="m", messages=messages)
    await stand.until(lambda health: health["counts"].get("failed") == 2)
    first, second = await stand.calls()
    assert first.attributes[conventions.LLM_INCOMPLETE] == second.attributes[conventions.LLM_INCOMPLETE] == "client_gone"
    assert second.attributes[conventions.LLM_RETRY_OF] == 1


async def test_other_providers_go_through_litellm_or_say_how_to_set_it_up(receiver: OtlpReceiver, model: ModelServer) -> None:
    models = ModelList([{"model_name": "g", "litellm_params": {"model": "gemini/flash"}}])
    async with proxy(receiver, ListedUpstreams(models), models=models) as stand:
        status, answer, _ = await stand.post(CHAT, {**BODY, "model": "g"})
        assert (status, answer["error"]["code"]) == (501, "no_litellm") and "AGL_LITELLM_URL" in answer["error"]["message"]
        async with stand.client() as client:
            with pytest.raises(openai.APIStatusError, match="AGL_LITELLM_URL"):
                await client.models.list()
    async with proxy(receiver, ListedUpstreams(models), models=models, limits=Limits(litellm_url=f"{model.url}/")) as stand:
        assert (await stand.post(CHAT, {**BODY, "model": "g"}))[0] == 200
        async with stand.client() as client:
            assert [card.id async for card in client.models.list()] == ["m"]
    assert model.requests[0]["model"] == "gemini/flash"


class Connected:
    """A fake store with the proxy's address and the token."""

    def __init__(self, url: str | None, token: str = "secret") -> None:
        self.description, self.token = Describe(queue="127.0.0.1:1", proxy=url), token


async def test_llm_proxy_sets_the_models_of_the_stacks_proxy_and_removes_them(receiver: OtlpReceiver, model: ModelServer) -> None:
    params = {"model": "hosted_vllm/local", "api_base": model.url, "temperature": 0.5, "top_p": 0.9, "rpm": 5}
    entry: Any = {"model_name": "policy", "litellm_params": params}
    models = ModelList()
    async with proxy(receiver, ListedUpstreams(models), models=models, token="secret") as stand:
        store: Any = Connected(stand.url)
        llm_proxy = LLMProxy(port=12358, model_list=[entry], store=store, num_workers=4)
        await llm_proxy.start()
        asked = {**BODY, "model": "policy"}
        assert (await stand.post("/v1/chat/completions", asked, authorization="Bearer secret"))[0] == 200
        free = llm_proxy.as_resource(sampling_parameters={"temperature": 0})
        assert (free.model, free.sampling_parameters) == ("local", {"temperature": 0, "top_p": 0.9}) and isinstance(free, ProxyLLM)
        routed = llm_proxy.as_resource("ro-1", "at-1")
        assert routed.api_key == attempt_key("secret", "ro-1", "at-1")
        key = {"authorization": f"Bearer {routed.api_key}"}
        assert (await stand.post(f"{routed.endpoint.removeprefix(stand.url)}/chat/completions", asked, **key))[0] == 200
        other: Any = {**entry, "model_name": "other"}
        llm_proxy.update_model_list([entry, other])
        assert models.names() == ["policy"]
        await llm_proxy.restart()
        assert models.names() == ["policy", "other"] and llm_proxy.is_running()
        with pytest.raises(ValueError, match="policy"):
            llm_proxy.as_resource()
        with pytest.raises(ValueError, match="or neither"):
            llm_proxy.as_resource("ro-1")
        await llm_proxy.stop()
        assert models.names() == [] and not llm_proxy.is_running()
        foreign: Any = Connected(stand.url, "wrong")
        with pytest.raises(ModelServerError, match="401"):
            await LLMProxy(model_list=[entry], store=foreign).start()
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await llm_proxy.start()
    assert [(request["model"], request["top_p"], "rpm" in request) for request in model.requests] == [("local", 0.9, False)] * 2


async def test_a_model_of_another_provider_is_a_resource_that_litellm_serves(receiver: OtlpReceiver, model: ModelServer) -> None:
    resource = LLMProxy(model_list=[{"model_name": "g", "litellm_params": {"model": "gemini/flash"}}]).as_resource()
    assert (resource.endpoint, resource.model) == ("litellm:", "gemini/flash")
    with pytest.raises(UsageError, match="names no server"):
        LLMProxy(model_list=[{"model_name": "g", "litellm_params": {"model": "flash"}}])


async def test_the_list_of_models_gives_aliases_and_may_change(receiver: OtlpReceiver, model: ModelServer) -> None:
    models = ModelList()
    async with proxy(receiver, ListedUpstreams(models), models=models) as stand:
        status, answer, _ = await stand.post(CHAT, {**BODY, "model": "claude-sonnet-9"})
        assert status == 404 and "claude-sonnet-9" in answer["error"]["message"]
        entry = {"model_name": "claude-*", "litellm_params": {"model": "hosted_vllm/local", "api_base": model.url, "api_key": "k"}}
        assert (await stand.post("/model_list", {"model_list": [entry]}))[1] == {"models": ["claude-*"]}
        assert (await stand.post(CHAT, {**BODY, "model": "claude-sonnet-9"}))[0] == 200
        async with stand.client("/v1") as client:
            assert [card.id async for card in client.models.list()] == ["claude-*"]
        counted = {"model": "claude-sonnet-9", "messages": []}
        assert (await stand.post("/v1/messages/count_tokens", counted))[:2] == (200, {"input_tokens": 5})
    assert [request["model"] for request in model.requests] == ["local", "local"] and model.headers[0]["authorization"] == "Bearer k"
    (span,) = receiver.spans(conventions.SPAN_LLM)
    assert span.attributes["gen_ai.request.model"] == "claude-sonnet-9"
