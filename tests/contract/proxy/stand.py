"""A client like an agent's, and its proxy."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import aiohttp
import openai
from aiohttp import web

from agl_otel.net.http_server import make_runner
from agl_otel.proxy.app import Proxy
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.litellm import Litellm
from agl_otel.proxy.models import ModelList
from agl_otel.proxy.upstream import Upstreams
from agl_otel.telemetry.setup import Telemetry
from agl_otel_hook import conventions
from tests.otlp_receiver import OtlpReceiver, Received

KEY = ("ro-1", "at-1")
SCOPE = "/rollout/ro-1/attempt/at-1"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Stand:
    """The proxy in this process, and a client like an agent's."""

    def __init__(self, url: str, telemetry: Telemetry, receiver: OtlpReceiver) -> None:
        self.url, self._telemetry, self._receiver = url, telemetry, receiver

    def client(self, path: str = "/rollout/ro-1/attempt/at-1/v1", **headers: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + path, api_key="dummy", max_retries=0, default_headers=headers)

    async def calls(self) -> list[Received]:
        await self.health()  # what has ended is recorded by then
        await asyncio.to_thread(self._telemetry.seal, [KEY])
        return self._receiver.spans(conventions.SPAN_LLM)

    async def close(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.post(f"{self.url}/rollout/ro-1/attempt/at-1/close") as answer:
                    if answer.status != 503:  # it has not stored all spans yet: a busy machine
                        assert answer.status == 200, await answer.text()
                        return await answer.json()

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
        """Post; return status, JSON and headers of the answer."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                self.url + path, data=io.BytesIO(json.dumps(body).encode() if body is not None else b""), headers=headers
            ) as answer,
        ):
            return answer.status, await answer.json(), answer.headers

    async def until(self, reached: Callable[[Any], bool]) -> None:
        """Wait until the proxy's health satisfies a condition."""
        while not reached(await self.health()):  # noqa: ASYNC110  # the proxy tells nobody
            await asyncio.sleep(0.01)

    async def health(self) -> Any:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/health") as answer:
            return await answer.json()


@contextlib.asynccontextmanager
async def proxy(
    receiver: OtlpReceiver,
    upstreams: Upstreams,
    *,
    token: str = "",
    limits: Limits | None = None,
    models: ModelList | None = None,
    litellm: Litellm | None = None,
) -> AsyncGenerator[Stand]:
    telemetry = Telemetry(otlp_endpoint=receiver.grpc_address, service_name="proxy")
    served = Proxy(upstreams, telemetry, token=token, limits=limits or Limits(), flush_seconds=2.0, models=models, litellm=litellm)
    runner = make_runner(served.app(), handler_cancellation=True)
    try:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Stand(f"http://127.0.0.1:{runner.addresses[0][1]}", telemetry, receiver)
    finally:
        await runner.cleanup()
        await asyncio.to_thread(telemetry.shutdown)


async def ask(client: openai.AsyncOpenAI, messages: Any = HELLO, **options: Any) -> Any:
    async with client:
        return await client.chat.completions.create(model="gpt-any", messages=messages, **options)
