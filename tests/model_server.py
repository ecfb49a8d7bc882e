"""A small real OpenAI-compatible model server for tests: scripted replies, vLLM's token ids and log-probs, streamed or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from agl_otel import semconv

Json = dict[str, Any]


class ModelServer:
    """Answers every prompt by the rule in `reply`; keeps what it was asked in `requests`.

    Token ids: a message's characters as code points, with 1 before and 2 after each message; so a prompt that holds an earlier
    reply starts with that call's prompt and reply, as real chat templates do.
    """

    def __init__(self) -> None:
        self.requests: list[Json] = []
        self.headers: list[Mapping[str, str]] = []
        self.asked = asyncio.Event()
        self.status = 200
        self.plain = False
        self.hold: asyncio.Event | None = None
        self.break_off_after: int | None = None
        self.cancelled = 0
        self.logprob: Any = -0.5
        self.version: str | None = "7"
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 27)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    @staticmethod
    def prompt_ids(messages: Sequence[Json]) -> list[int]:
        return [i for m in messages for i in (1, *map(ord, str(m["content"])), *((2,) if m["role"] != "assistant" else ()))] + [1]

    @staticmethod
    def reply(messages: Sequence[Json], choice: int) -> str:
        return f"{choice}:{messages[-1]['content']}"[::-1]

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "test"}]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        self.requests.append(body)
        self.headers.append(request.headers)
        self.asked.set()
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.plain and "return_token_ids" in body:
            return web.json_response({"error": {"message": "Unrecognized request argument supplied: return_token_ids"}}, status=400)
        if self.status != 200:
            return web.json_response({"error": {"message": "told to fail", "type": "server_error"}}, status=self.status)
        headers = {semconv.HEADER_MODEL_VERSION: self.version} if self.version else {}
        if body.get("stream"):
            return await self._stream(request, body, headers)
        choices = [self._choice(body, index, self.reply(body["messages"], index), "message") for index in range(body.get("n", 1))]
        answer = {
            **self._head(body, "chat.completion"),
            "choices": choices,
            "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        }
        return web.json_response(answer, headers=headers)

    async def _stream(self, request: web.Request, body: Json, headers: Mapping[str, str]) -> web.StreamResponse:
        response = web.StreamResponse(headers={**headers, "content-type": "text/event-stream"})
        await response.prepare(request)
        sent = 0
        for index in range(body.get("n", 1)):
            text = self.reply(body["messages"], index)
            for place, piece in enumerate([text[:2], text[2:]]):
                if sent == self.break_off_after:
                    assert request.transport is not None
                    request.transport.close()
                    return response
                head = self._head(body, "chat.completion.chunk", first=place == 0)
                choice = self._choice(body, index, piece, "delta", finish="stop" if place else None)
                await response.write(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")
                sent += 1
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _head(self, body: Json, kind: str, *, first: bool = True) -> Json:
        head: Json = {"id": "chatcmpl-1", "object": kind, "created": 0, "model": body["model"]}
        if body.get("return_token_ids") and first:
            head["prompt_token_ids"] = self.prompt_ids(body["messages"])
        return head

    def _choice(self, body: Json, index: int, text: str, said: str, finish: str | None = "stop") -> Json:
        choice: Json = {"index": index, said: {"role": "assistant", "content": text}, "finish_reason": finish, "logprobs": None}
        if body.get("logprobs"):
            choice["logprobs"] = {"content": [{"token": t, "logprob": self.logprob, "bytes": None, "top_logprobs": []} for t in text]}
        if body.get("return_token_ids"):
            choice["token_ids"] = [ord(t) for t in text]
        return choice
