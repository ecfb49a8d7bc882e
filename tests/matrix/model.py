"""The scripted model as a server, which remembers what it sampled: what the product must show is compared with that."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from agl_otel.types.sampling import LENIENT
from agl_otel_hook import conventions
from tests.matrix.script import Message, Reply, Request, Sampled, riddle, sample
from tests.matrix.wire import PROTOCOLS, Json, Protocol

VERSION = "3"
"""Of its weights, as it says with every answer."""


@dataclass(frozen=True)
class Served:
    """One answer."""

    span_id: str
    """Of the caller's span, here the proxy's, as hex; empty where the request names none."""
    protocol: str
    streamed: bool
    cities: tuple[str, str] | None
    """Of the question that it answered: whose call it is, told by the conversation itself."""
    sampled: Sampled
    answer_id: str = ""


class ScriptedModel:
    """Serves all protocols at `url` (ends in /v1). `async with` it."""

    def __init__(self, reply: Reply = riddle) -> None:
        self._reply = reply
        self.asked: list[Json] = []
        """The bodies of requests, in the order of `served`."""
        self.served: list[Served] = []
        self.url = ""
        self._said: dict[str, tuple[Message, ...]] = {}
        self._runner: web.AppRunner | None = None

    async def __aenter__(self) -> ScriptedModel:
        app = web.Application(client_max_size=1 << 26)
        for protocol in PROTOCOLS:
            app.router.add_post(f"/v1/{protocol.path}", self._handler(protocol))
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _handler(self, protocol: Protocol) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._answer(request, protocol)

        return handle

    async def _answer(self, request: web.Request, protocol: Protocol) -> web.StreamResponse:
        body: Json = await request.json()
        asked = protocol.read(body)
        earlier = self._said.get(body.get("previous_response_id") or "", ())
        asked = Request((*earlier, *asked.messages), asked.tools)
        number = len(self.served)
        self.asked.append(body)
        sampled = sample(asked, number, self._reply)
        answer_id = f"{protocol.path.partition('/')[0]}-{number}"
        self._said[answer_id] = (*asked.messages, sampled.reply)
        parts = request.headers.get("traceparent", "").split("-")
        span_id = parts[2] if len(parts) == 4 else ""
        self.served.append(Served(span_id, protocol.path, bool(body.get("stream")), asked.cities, sampled, answer_id))
        headers = {conventions.HEADER_MODEL_VERSION: VERSION, conventions.HEADER_SAMPLING: LENIENT}
        if not body.get("stream"):
            return web.json_response(protocol.whole(sampled, answer_id, body), headers=headers)
        response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await response.prepare(request)
        for name, payload in protocol.events(sampled, answer_id, body):
            line = f"event: {name}\n" if name else ""
            await response.write(f"{line}data: {json.dumps(payload)}\n\n".encode())
        await response.write(protocol.done)
        await response.write_eof()
        return response
