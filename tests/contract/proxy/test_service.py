"""`python -m agl_otel.proxy` beside a real queue: which model server a rollout's calls go to, announcing, ports, SIGTERM."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import openai
import pytest

from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel_hook import conventions
from tests.contract.proxy.processes import healthy, rollout, start, stop
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

pytestmark = pytest.mark.full


async def refused(settings: Settings) -> None:
    """Wait until the port is closed; a connection not yet accepted at that moment is reset."""
    with pytest.raises(ConnectionError):
        while True:
            _, writer = await asyncio.open_connection(settings.host, settings.proxy_port)
            writer.close()


async def test_calls_go_where_the_rollouts_own_resources_say(
    receiver: OtlpReceiver, model: ModelServer, settings: Settings, queue: QueueClient
) -> None:
    url = f"http://{settings.host}:{settings.proxy_port}"
    old = await rollout(queue, model.url, "old-model", {"temperature": 0.5})
    new = await rollout(queue, model.url + "/", "new-model")
    proxy = await start("agl_otel.proxy", settings)
    await healthy(url)
    for started in (old, new, old):
        base_url = f"{url}/rollout/{started.rollout_id}/attempt/{started.attempt.attempt_id}/v1"
        async with openai.AsyncOpenAI(base_url=base_url, api_key="dummy", max_retries=0) as client:
            await client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    assert [(r["model"], r.get("temperature")) for r in model.requests] == [("old-model", 0.5), ("new-model", None), ("old-model", 0.5)]
    assert [headers["authorization"] for headers in model.headers] == ["Bearer real-key"] * 3
    assert (await queue.describe()).proxies == [url]
    status, err = await stop(proxy)
    assert status == 0 and "Traceback" not in err, err
    assert (await queue.describe()).proxies == []
    assert len(receiver.spans(conventions.SPAN_LLM)) == 3
    assert sorted(seal.attributes[conventions.SEAL_SPANS] for seal in receiver.spans(conventions.SPAN_SEAL))[-2:] == [1, 2]


async def test_what_cannot_be_forwarded_is_explained(settings: Settings, queue: QueueClient) -> None:
    url = f"http://{settings.host}:{settings.proxy_port}"
    looped = await rollout(queue, f"{url}/v1", "m")
    proxy = await start("agl_otel.proxy", settings)
    await healthy(url)
    async with aiohttp.ClientSession() as session:
        for path, status, words in (
            ("/rollout/ro-unknown/attempt/at-1/v1", 404, "ro-unknown"),
            (f"/rollout/{looped.rollout_id}/attempt/{looped.attempt.attempt_id}/v1", 404, "no LLM among its resources"),
            ("/v1", 404, "AGL_UPSTREAM_URL"),
        ):
            async with session.post(f"{url}{path}/chat/completions", json={"messages": []}) as answer:
                assert (answer.status, words in (await answer.json())["error"]["message"]) == (status, True), path
    assert (await stop(proxy))[0] == 0


async def test_a_call_under_way_ends_before_the_proxy_does(receiver: OtlpReceiver, model: ModelServer, settings: Settings) -> None:
    url = f"http://{settings.host}:{settings.proxy_port}"
    proxy = await start("agl_otel.proxy", settings, AGL_UPSTREAM_URL=model.url)
    await healthy(url)
    model.hold = asyncio.Event()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="own-key", max_retries=0) as client:
        call = asyncio.create_task(client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}]))
        await model.asked.wait()
        stopping = asyncio.create_task(stop(proxy))
        await refused(settings)
        model.hold.set()
        assert (await call).choices[0].message.content == "ih:0"
    assert model.headers[0]["authorization"] == "Bearer own-key"
    assert (await stopping)[0] == 0
    assert len(receiver.spans(conventions.SPAN_LLM)) == 1


async def test_a_port_in_use_is_one_clear_line(settings: Settings) -> None:
    with socket.create_server((settings.host, settings.proxy_port)):
        process = await start("agl_otel.proxy", settings)
        _, err = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 1
    assert err.decode().splitlines() == [
        f"agl-otel proxy: cannot listen on 127.0.0.1:{settings.proxy_port} (Address already in use): "
        "stop what runs there, or choose another with AGL_PROXY_PORT"
    ]
