"""The proxy of a stack with a token, as a process: what it gives to untrusted clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
import pytest

from agl_otel.net.auth import attempt_key, scoped_token, shared_key
from agl_otel.settings import Settings, free_port
from agl_otel_hook import conventions
from tests.contract.proxy.processes import healthy, start, stop
from tests.contract.proxy.stand import HELLO
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

pytestmark = pytest.mark.full
TOKEN = "secret"
SHOWN = {"authorization": f"Bearer {TOKEN}"}
TRACE = "0af7651916cd43dd8448eb211c80319c"
OF_ANOTHER = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "baggage": f"{conventions.PROCESS}=marker-of-another"}


@contextlib.asynccontextmanager
async def served(settings: Settings, upstream: str, **environment: str) -> AsyncGenerator[str]:
    url = f"http://{settings.host}:{settings.proxy_port}"
    process = await start("agl_otel.proxy", settings, AGL_TOKEN=TOKEN, AGL_UPSTREAM_URL=upstream, **environment)
    try:
        await healthy(url)
        yield url
    finally:
        status, err = await stop(process)
    assert status == 0 and "Traceback" not in err, err


async def asked(url: str, headers: Mapping[str, str], *, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    body = {"model": "m", "messages": HELLO}
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def health_of(url: str, headers: Mapping[str, str]) -> Any:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health", headers=headers) as answer:
        return await answer.json()


def with_password(url: str) -> str:
    return url.replace("://", "://opuser:OPPASSWORD@")


async def test_no_key_but_ours_opens_the_proxy(model: ModelServer, settings: Settings, receiver: OtlpReceiver) -> None:
    strangers = ("", "junk", "Bearer", "Bearer ", "Bearer junk", "Bearer Bearer secret", "Basic x", "Bearer sk-mine", "Bearer agl-junk")
    own = attempt_key(TOKEN, "ro-1", "at-1")
    async with served(settings, with_password(model.url)) as url:
        for headers in (*({"authorization": each} for each in strangers), {}, {"x-api-key": "junk"}, {"authorization": f"Bearer {own}"}):
            for path in ("/v1/chat/completions", "/messages", "/v1/messages/count_tokens"):
                status, answer = await asked(url, {**headers, **OF_ANOTHER}, path=path)
                assert status == 401 and "AGL_TOKEN" in answer["error"]["message"], headers
            async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models", headers=headers) as listed:
                assert listed.status == 401
        assert not model.requests
        scoped, calling = (scoped_token(TOKEN, [scope], 1 << 33) for scope in ("proxy", "models"))
        for key in (TOKEN, shared_key(TOKEN), scoped, calling):
            assert (await asked(url, {"authorization": f"Bearer {key}"}))[0] == 200
            assert (await asked(url, {"x-api-key": key}))[0] == 200
        only_calls = {"authorization": f"Bearer {calling}"}
        for path in ("/pause", "/resume", "/close", "/rollout/ro-1/attempt/at-1/v1/chat/completions"):
            assert (await asked(url, only_calls, path=path))[0] == 401, path
        of_an_attempt = {"baggage": f"{conventions.ROLLOUT_ID}=ro-1,{conventions.ATTEMPT_ID}=at-1"}
        assert (await asked(url, {**only_calls, **of_an_attempt}))[0] == 401
        assert await health_of(url, only_calls) == {"status": "ok"}
    assert len(receiver.spans(conventions.SPAN_LLM)) == 8
    assert all(key not in str(headers) for key in (TOKEN, scoped) for headers in model.headers)


async def test_a_call_with_its_own_key_gets_nothing_of_the_stacks(model: ModelServer, settings: Settings, receiver: OtlpReceiver) -> None:
    async with served(settings, with_password(model.url), AGL_PROXY_OWN_KEYS="true", AGL_UPSTREAM_KEY="key-of-the-stack") as url:
        for headers in ({}, {"authorization": "Bearer agl-junk"}, {"x-api-key": "aglt-proxy-1-0"}):
            assert (await asked(url, headers))[0] == 401
        assert (await asked(url, {"authorization": "Bearer sk-mine", "x-api-key": "sk-mine", **OF_ANOTHER}))[0] == 200
        baggage = f"{conventions.ROLLOUT_ID}=ro-1,{conventions.ATTEMPT_ID}=at-1"
        assert (await asked(url, {"authorization": "Bearer sk-mine", "baggage": baggage}))[0] == 401, "it names an attempt"
    (sent,) = model.headers
    assert (sent["authorization"], sent["x-api-key"]) == ("Bearer sk-mine", "sk-mine")
    assert TRACE not in sent["traceparent"]
    (span,) = receiver.spans(conventions.SPAN_LLM)
    assert span.trace_id != TRACE and not span.parent_id and conventions.LLM_CALLER not in span.attributes


async def test_health_without_the_token_has_only_the_status(settings: Settings) -> None:
    async with served(settings, f"http://opuser:OPPASSWORD@127.0.0.1:{free_port()}/v1") as url:
        asking = asyncio.create_task(asked(url, SHOWN))
        while not (told := await health_of(url, SHOWN))["down"]:  # noqa: ASYNC110  # the proxy tells nobody
            await asyncio.sleep(0.01)
        assert "127.0.0.1" in told["down"][0] and "OPPASSWORD" not in str(told) and "opuser" not in str(told)
        for headers in ({}, {"authorization": "Bearer junk"}):
            assert await health_of(url, headers) == {"status": "ok"}
        assert (await asking)[0] == 502
