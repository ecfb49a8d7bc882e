"""A model server that keeps what it sampled, for whom, and who asked: each reply has an id of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextvars import ContextVar

from aiohttp import web

from tests.model_server import Json, ModelServer
from tests.proof.judge import Sampled
from tests.proof.plans import ASK_TO_KILL


class Witness(ModelServer):
    """`told` is called when an answer has gone out that asks for the proxy's end."""

    def __init__(self, told: Callable[[], object]) -> None:
        super().__init__()
        self._told = told
        self._reply_id: ContextVar[str] = ContextVar("reply_id")
        self.sampled: list[Sampled] = []

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body: Json = json.loads(await request.read())
        attempt_id, number, asks = str(body["messages"][-1]["content"]).split(" ", 2)
        place = len(self.sampled)
        reply_id = f"chatcmpl-{place}"
        self._reply_id.set(reply_id)
        parts = request.headers.get("traceparent", "").split("-")
        self.sampled.append(Sampled(attempt_id, number, reply_id, parts[2] if len(parts) == 4 else "", time.time_ns()))
        try:
            answer = await super()._chat(request)
        except ConnectionResetError:  # the proxy was killed, or its client
            answer = web.Response()
        self.requests.clear()
        self.headers.clear()
        if asks == ASK_TO_KILL and not any(reply.number == number for reply in self.sampled[:place]):  # once, not with each retry
            self._told()
        return answer

    def _head(self, body: Json, kind: str, *, first: bool = True) -> Json:
        return {**super()._head(body, kind, first=first), "id": self._reply_id.get()}
