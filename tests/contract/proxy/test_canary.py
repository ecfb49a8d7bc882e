"""Calls of no rollout by a set of resources, and canaries, with a real queue and real model servers."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from agl_otel.errors import UsageError
from agl_otel.net.auth import attempt_key
from agl_otel.proxy.canary import drawn, served_to
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.models import ModelList
from agl_otel.proxy.upstream import FixedUpstreams, QueueUpstreams, Upstream
from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel.types import LLM, AttemptedRollout, EnqueueRolloutRequest, NamedResources
from agl_otel_hook import conventions
from tests.contract.proxy.processes import healthy, start, stop
from tests.contract.proxy.stand import Stand, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver, Received

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
PRODUCTION = "production"
TOGETHER = 32  # calls at once


@dataclass
class Servers:
    """A stable model server and a canary's."""

    stable: ModelServer
    canary: ModelServer

    def resources(self, share: float | None, **canary: Any) -> NamedResources:
        made: NamedResources = {"main": LLM(endpoint=self.stable.url, model="policy", api_key="stable-key")}
        given: dict[str, Any] = {"endpoint": self.canary.url, "model": "policy", "api_key": "canary-key", "share": share, **canary}
        if share is not None:
            made["next"] = LLM(**given)
        return made

    def counts(self) -> tuple[int, int]:
        return len(self.stable.requests), len(self.canary.requests)


@pytest.fixture
async def servers(model: ModelServer) -> AsyncIterator[Servers]:
    canary = ModelServer()
    await canary.start()
    yield Servers(model, canary)
    await canary.stop()


@pytest.fixture
async def stand(receiver: OtlpReceiver, queue: QueueClient) -> AsyncIterator[Stand]:
    async with proxy(receiver, QueueUpstreams(queue, resources_id=PRODUCTION)) as stand:
        yield stand


async def ask(url: str, text: str, *, path: str = "/v1/chat/completions", model: str = "any", **headers: str) -> tuple[int, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def converse(url: str, conversations: Sequence[str], turns: int = 1) -> None:
    """Make calls of these conversations, whose texts are the conversations' ids."""
    body: Any = {"model": "any"}
    at_once = asyncio.Semaphore(TOGETHER)
    async with aiohttp.ClientSession() as session:

        async def turn(conversation: str) -> None:
            told = {**body, "messages": [{"role": "user", "content": conversation}]}
            headers = {conventions.HEADER_CONVERSATION_ID: conversation}
            async with at_once, session.post(f"{url}/v1/chat/completions", json=told, headers=headers) as answer:
                assert answer.status == 200, await answer.text()

        for _ in range(turns):
            await asyncio.gather(*map(turn, conversations))


def texts(server: ModelServer) -> Counter[str]:
    return Counter(request["messages"][-1]["content"] for request in server.requests)


def below(share: float, conversations: Sequence[str]) -> set[str]:
    return {each for each in conversations if drawn("next", each) < share}


async def spans_of(stand: Stand, receiver: OtlpReceiver, count: int) -> list[Received]:
    while len(spans := receiver.spans(conventions.SPAN_LLM)) < count:
        await stand.health()
        await asyncio.sleep(0.05)
    return spans


async def test_a_share_of_conversations_is_split_by_the_hash_never_flips_and_grows(
    stand: Stand, servers: Servers, queue: QueueClient
) -> None:
    conversations = [f"talk {number}" for number in range(1000)]
    await queue.put_resources(servers.resources(0.1), resources_id=PRODUCTION)
    await converse(stand.url, conversations, turns=5)
    small = below(0.1, conversations)
    assert texts(servers.canary) == Counter(dict.fromkeys(small, 5))
    assert texts(servers.stable) == Counter(dict.fromkeys({*conversations} - small, 5))
    assert 60 < len(small) < 140 and (await stand.health())["arms"] == {"main": 5 * (1000 - len(small)), "next": 5 * len(small)}
    await queue.put_resources(servers.resources(0.5), resources_id=PRODUCTION)
    probe = next(each for each in conversations if 0.1 <= drawn("next", each) < 0.5)
    while probe not in texts(servers.canary):
        await converse(stand.url, [probe])
    servers.canary.requests.clear()
    await converse(stand.url, conversations)
    assert small < texts(servers.canary).keys() == below(0.5, conversations)


async def test_a_canary_takes_so_many_conversations_of_a_version_and_keeps_them(
    stand: Stand, servers: Servers, queue: QueueClient, receiver: OtlpReceiver
) -> None:
    update = await queue.put_resources(servers.resources(1.0, most_conversations=3), resources_id=PRODUCTION)
    conversations = [f"talk {number}" for number in range(20)]
    await converse(stand.url, conversations, turns=2)
    first = texts(servers.canary)
    assert len(first) == 3 and set(first.values()) == {2}, "however many come at once"
    assert texts(servers.stable) == Counter(dict.fromkeys({*conversations} - first.keys(), 2))
    full = [span for span in await spans_of(stand, receiver, 40) if conventions.LLM_CANARY_FULL in span.attributes]
    assert {span.attributes[conventions.LLM_CANARY_FULL] for span in full} == {f"next@{update.version}"}
    assert {span.attributes[conventions.LLM_ARM] for span in full} == {"main"} and len(full) == 34
    assert (await stand.health())["counts"]["canary_full"] == 34
    await queue.put_resources(servers.resources(1.0, most_conversations=4), resources_id=PRODUCTION)
    while len(texts(servers.canary)) == 3:
        await converse(stand.url, [*first, "another"])
    await converse(stand.url, [f"later {number}" for number in range(20)])
    assert len(texts(servers.canary)) == 3 + 4 and texts(servers.canary).keys() > first.keys(), "those that it had do not count again"


async def test_the_proxy_asks_the_arm_whose_prompts_a_conversation_gets(stand: Stand, servers: Servers, queue: QueueClient) -> None:
    conversations = [f"talk {number}" for number in range(100)]
    update = await queue.put_resources(servers.resources(0.3), resources_id=PRODUCTION)
    await converse(stand.url, conversations)
    arms = {each: served_to(update, each).arm for each in conversations}
    assert set(texts(servers.canary)) == {each for each in conversations if arms[each] == "next"}
    assert set(texts(servers.stable)) == {each for each in conversations if arms[each] == "main"}


async def test_a_version_without_the_canary_ends_it_within_a_moment(stand: Stand, servers: Servers, queue: QueueClient) -> None:
    await queue.put_resources(servers.resources(1.0), resources_id=PRODUCTION)
    await converse(stand.url, ["a", "b"])
    assert servers.counts() == (0, 2)
    await queue.put_resources(servers.resources(None), resources_id=PRODUCTION)
    while not servers.stable.requests:
        await converse(stand.url, ["a"])
    servers.canary.requests.clear()
    await converse(stand.url, ["a", "b", "c"])
    assert not servers.canary.requests


async def test_a_canary_that_is_killed_is_stood_in_for_and_the_calls_say_so(
    stand: Stand, servers: Servers, queue: QueueClient, receiver: OtlpReceiver
) -> None:
    await queue.put_resources(servers.resources(1.0, sampling_parameters={"temperature": 0.5}), resources_id=PRODUCTION)
    await converse(stand.url, ["before"])
    await servers.canary.stop()
    await converse(stand.url, [f"after {number}" for number in range(20)])
    assert texts(servers.stable).total() == 20
    before, *after = await spans_of(stand, receiver, 21)
    assert (before.attributes[conventions.LLM_ARM], before.attributes.get(conventions.LLM_CANARY_FAILED)) == ("next", None)
    assert before.attributes["gen_ai.request.temperature"] == 0.5
    assert {(s.attributes[conventions.LLM_ARM], s.attributes[conventions.LLM_CANARY_FAILED], s.error) for s in after} == {
        ("main", "next", False)
    }
    assert not any("gen_ai.request.temperature" in span.attributes for span in after)
    assert (await stand.health())["counts"]["canary_failed"] == 20
    keys = {headers["authorization"] for headers in servers.stable.headers}
    assert keys == {"Bearer stable-key"} and servers.canary.headers[0]["authorization"] == "Bearer canary-key"


@pytest.mark.parametrize("status", [502, 503, 504])
async def test_a_canary_that_cannot_serve_is_asked_once_and_then_left_alone(receiver: OtlpReceiver, servers: Servers, status: int) -> None:
    servers.canary.status = status
    canary, stable = Upstream(servers.canary.url, arm="next", canary=True), Upstream(servers.stable.url, arm="main")
    async with proxy(receiver, FixedUpstreams(canary, stable)) as stand:
        for text in ("one", "two"):
            assert (await ask(stand.url, text))[0] == 200
        assert texts(servers.stable) == {"one": 1, "two": 1} and texts(servers.canary) == {"one": 1}
        spans = await spans_of(stand, receiver, 2)
        assert [span.attributes[conventions.LLM_CANARY_FAILED] for span in spans] == ["next", "next"]
        assert [span.attributes.get(conventions.LLM_TRIES) for span in spans] == [2, None]
        servers.stable.status = status
        assert (await ask(stand.url, "three"))[0] == status, "nobody is left"


@pytest.mark.parametrize(("litellm_url", "more"), [("", {}), ("http://127.0.0.1:9/v1", {}), ("http://127.0.0.1:9/v1", {"unknown": 1})])
async def test_a_canary_that_litellm_cannot_serve_is_stood_in_for(
    receiver: OtlpReceiver, servers: Servers, litellm_url: str, more: dict[str, int]
) -> None:
    """Without a litellm, with one that is away, and by a field that no request to it may have."""
    canary = Upstream("", "provider/x", provider="litellm", arm="next", canary=True)
    async with proxy(
        receiver, FixedUpstreams(canary, Upstream(servers.stable.url, arm="main")), limits=Limits(litellm_url=litellm_url)
    ) as stand:
        body = {"model": "any", "messages": [{"role": "user", "content": "x"}], **more}
        assert (await stand.post("/v1/chat/completions", body))[0] == 200
        (span,) = await spans_of(stand, receiver, 1)
    assert (span.attributes[conventions.LLM_ARM], span.attributes[conventions.LLM_CANARY_FAILED]) == ("main", "next")


async def test_an_answer_that_a_canary_began_is_not_asked_for_again(stand: Stand, servers: Servers, queue: QueueClient) -> None:
    await queue.put_resources(servers.resources(1.0), resources_id=PRODUCTION)
    servers.canary.status = 500
    assert (await ask(stand.url, "x"))[0] == 500
    servers.canary.status, servers.canary.cut_answers = 200, True
    assert (await ask(stand.url, "x"))[0] == 502
    assert servers.counts() == (0, 2)


async def test_a_pool_of_one_model_has_no_canary_and_names_choose_as_before(
    stand: Stand, servers: Servers, queue: QueueClient, receiver: OtlpReceiver
) -> None:
    other = ModelServer()
    await other.start()
    try:
        twin: NamedResources = {"next": servers.resources(0.0)["next"], "main": servers.resources(None)["main"]}
        twin["twin"] = LLM(endpoint=other.url, model="policy", api_key="twin-key")
        await queue.put_resources(twin, resources_id=PRODUCTION)
        for model in ("any", "policy", "main", "twin"):
            for number in range(8):
                assert (await ask(stand.url, f"{number}", model=model))[0] == 200
        assert servers.stable.requests and other.requests and not servers.canary.requests
        assert (await ask(stand.url, "named", model="next"))[0] == 200
        assert not servers.canary.requests, "users do not choose who answers them"
        arms = Counter(span.attributes[conventions.LLM_ARM] for span in await spans_of(stand, receiver, 33))
        assert arms == {"main": len(servers.stable.requests), "twin": len(other.requests)}
        assert (await stand.health())["arms"] == arms
        async with aiohttp.ClientSession() as session, session.get(f"{stand.url}/v1/models") as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["policy"]
        async with aiohttp.ClientSession() as session, session.get(f"{stand.url}/metrics") as answer:
            assert f'agl_proxy_arms_total{{arm="twin"}} {len(other.requests)}.0' in await answer.text()
    finally:
        await other.stop()


async def started(queue: QueueClient, resources: NamedResources, count: int) -> list[AttemptedRollout]:
    update = await queue.put_resources(resources, resources_id="rs-1")
    return await queue.start([EnqueueRolloutRequest(input=1, resources_id=update.resources_id) for _ in range(count)])


async def test_rollouts_of_a_set_with_a_canary_are_split_too(
    stand: Stand, servers: Servers, queue: QueueClient, receiver: OtlpReceiver
) -> None:
    rollouts = {each.rollout_id: each.attempt.attempt_id for each in await started(queue, servers.resources(0.5), 40)}
    for _ in range(2):
        for rollout_id, attempt_id in rollouts.items():
            path = f"/rollout/{rollout_id}/attempt/{attempt_id}/v1/chat/completions"
            assert (await ask(stand.url, rollout_id, path=path))[0] == 200
    mine = below(0.5, [*rollouts])
    assert mine and texts(servers.canary) == Counter(dict.fromkeys(mine, 2))
    spans = await spans_of(stand, receiver, 80)
    assert {(span.key[0], span.attributes[conventions.LLM_ARM]) for span in spans} == {
        (each, "next" if each in mine else "main") for each in rollouts
    }
    assert not any(conventions.CONVERSATION_ID in span.attributes for span in spans)
    await queue.put_resources({"main": servers.resources(None)["main"]}, resources_id="rs-2")
    (alone,) = await queue.start([EnqueueRolloutRequest(input=1, resources_id="rs-2")])
    path = f"/rollout/{alone.rollout_id}/attempt/{alone.attempt.attempt_id}/v1/chat/completions"
    assert (await ask(stand.url, "alone", path=path))[0] == 200
    assert conventions.LLM_ARM not in (await spans_of(stand, receiver, 81))[-1].attributes


async def test_a_conversation_is_recorded_where_its_caller_named_it(
    stand: Stand, servers: Servers, queue: QueueClient, receiver: OtlpReceiver
) -> None:
    await queue.put_resources(servers.resources(None), resources_id=PRODUCTION)
    trace = "0af7651916cd43dd8448eb211c80319c"
    for headers in (
        {"baggage": f"{conventions.CONVERSATION_ID}={quote('chat/1')}"},
        {conventions.HEADER_CONVERSATION_ID: "chat 2"},
        {"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
    ):
        assert (await ask(stand.url, "x", **headers))[0] == 200
    spans = await spans_of(stand, receiver, 3)
    assert [span.attributes.get(conventions.CONVERSATION_ID) for span in spans] == ["chat/1", "chat 2", None]
    assert spans[2].trace_id == trace
    assert not any(conventions.HEADER_CONVERSATION_ID in headers for headers in servers.stable.headers)


async def test_models_that_only_the_proxys_own_list_names_stay_there(servers: Servers, queue: QueueClient, receiver: OtlpReceiver) -> None:
    listed = {"model": "hosted_vllm/own", "api_base": servers.canary.url}
    models = ModelList([{"model_name": name, "litellm_params": listed} for name in ("own", "policy", "pattern-*")])
    upstreams = QueueUpstreams(queue, models=models, fallback_url=servers.canary.url, resources_id=PRODUCTION)
    async with proxy(receiver, upstreams, models=models) as stand:
        assert (await ask(stand.url, "x", model="other"))[0] == 200
        assert servers.counts() == (0, 1), "there is no such set: AGL_UPSTREAM_URL serves it"
        await queue.put_resources(servers.resources(None), resources_id=PRODUCTION)
        while not servers.stable.requests:
            await ask(stand.url, "x", model="other")
        servers.canary.requests.clear()
        servers.stable.requests.clear()
        for model in ("own", "policy", "pattern-1", "other", "main"):
            assert (await ask(stand.url, model, model=model))[0] == 200
        assert (texts(servers.canary), texts(servers.stable)) == ({"own": 1}, {"policy": 1, "pattern-1": 1, "other": 1, "main": 1})
        async with aiohttp.ClientSession() as session, session.get(f"{stand.url}/v1/models") as answer:
            assert [card["id"] for card in (await answer.json())["data"]] == ["policy", "own", "pattern-*"]


async def test_without_any_server_the_error_names_the_set(stand: Stand) -> None:
    status, answer = await ask(stand.url, "x")
    assert status == 404 and "AGL_UPSTREAM_RESOURCES" in answer["error"]["message"] and PRODUCTION in answer["error"]["message"]


async def test_shares_above_one_are_refused_when_they_are_published(servers: Servers, queue: QueueClient) -> None:
    resources = {**servers.resources(0.6), "third": servers.resources(0.5)["next"]}
    with pytest.raises(UsageError, match=r"the shares of the canaries sum up to 1\.1"):
        await queue.put_resources(resources, resources_id=PRODUCTION)


async def test_a_process_serves_the_last_version_while_the_queue_is_away_and_keeps_what_it_recorded_when_killed(
    settings: Settings, servers: Servers, receiver: OtlpReceiver
) -> None:
    url, queue_process = f"http://{settings.host}:{settings.proxy_port}", await start("agl_otel.queue", settings)
    async with QueueClient(f"{settings.host}:{settings.queue_port}", retry_seconds=300) as queue:
        await queue.put_resources(servers.resources(1.0), resources_id=PRODUCTION)
        (attempted,) = await started(queue, servers.resources(1.0), 1)
        process = await start("agl_otel.proxy", settings)
        await healthy(url)
        await converse(url, ["with the queue"])
        receiver.refuse = True
        await servers.canary.stop()
        path = f"/rollout/{attempted.rollout_id}/attempt/{attempted.attempt.attempt_id}"
        assert (await ask(url, "of a rollout", path=f"{path}/v1/chat/completions"))[0] == 200
        queue_process.kill()
        await queue_process.communicate()
        end = asyncio.get_running_loop().time() + 3.0
        while asyncio.get_running_loop().time() < end:
            await converse(url, ["without it"])
        process.send_signal(signal.SIGKILL)
        await process.communicate()
        receiver.refuse = False
        queue_process = await start("agl_otel.queue", settings)
        process = await start("agl_otel.proxy", settings)
        await healthy(url)
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.post(f"{url}{path}/close") as answer:
                    if answer.status != 503:
                        assert answer.status == 200, await answer.text()
                        break
    (span,) = [each for each in receiver.spans(conventions.SPAN_LLM) if each.key[0] == attempted.rollout_id]
    assert (span.attributes[conventions.LLM_ARM], span.attributes[conventions.LLM_CANARY_FAILED]) == ("main", "next")
    assert [(await stop(each))[0] for each in (process, queue_process)] == [0, 0]


async def test_clients_with_a_key_of_their_own_get_no_canary_and_no_conversation(
    settings: Settings, servers: Servers, receiver: OtlpReceiver
) -> None:
    token = "secret"
    url, queue_process = (
        f"http://{settings.host}:{settings.proxy_port}",
        await start("agl_otel.queue", settings, AGL_TOKEN=token),
    )
    async with QueueClient(f"{settings.host}:{settings.queue_port}", retry_seconds=300, token=token) as queue:
        await queue.put_resources(servers.resources(1.0), resources_id=PRODUCTION)
    process = await start("agl_otel.proxy", settings, AGL_TOKEN=token, AGL_PROXY_OWN_KEYS="true")
    await healthy(url)
    named = {conventions.HEADER_CONVERSATION_ID: "chat"}
    assert (await ask(url, "own", authorization="Bearer sk-mine", **named))[0] == 200
    assert (await ask(url, "ours", authorization=f"Bearer {token}", **named))[0] == 200
    assert (await ask(url, "bad", authorization=f"Bearer {attempt_key(token, 'ro-1', 'at-1')}", **named))[0] == 401
    assert [(await stop(each))[0] for each in (process, queue_process)] == [0, 0]
    assert (texts(servers.stable), texts(servers.canary)) == ({"own": 1}, {"ours": 1})
    assert servers.stable.headers[0]["authorization"] == "Bearer sk-mine"
    found = {
        span.attributes[conventions.LLM_ARM]: span.attributes.get(conventions.CONVERSATION_ID)
        for span in receiver.spans(conventions.SPAN_LLM)
    }
    assert found == {"main": None, "next": "chat"}
