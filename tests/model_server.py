"""A small real OpenAI-compatible model server for tests: scripted replies, vLLM's token ids and log-probs, streamed or not."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from agl_otel.proxy.logprob_mode import FIELDS
from agl_otel_hook import conventions

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ModelServer:
    """Answers every prompt by the rule in `reply`; keeps what it was asked in `requests`.

    Token ids: a message's characters as code points, with 1 before and 2 after each message; so a prompt that holds an earlier
    reply starts with that call's prompt and reply, as real chat templates do.
    """

    def __init__(self, routes: Mapping[str, Handler] | None = None) -> None:
        self.routes = routes or {}
        self.requests: list[Json] = []
        self.headers: list[Mapping[str, str]] = []
        self.probes = 0
        """How often a proxy asked for its log-probs alone (logprob_mode.py): not in `requests`."""
        self.asked = asyncio.Event()
        self.status = 200
        self.redirect = ""
        """Where chat/completions point instead of answering."""
        self.plain = False
        self.refused = ""
        """A chat whose text has it is answered with 400 and the whole request, as servers do that validate."""
        self.hold: asyncio.Event | None = None
        self.break_off_after: int | None = None
        self.cut_answers = False
        """Answers that are no streams break off in their middle."""
        self.cancelled = 0
        self.logprob: Any = -0.5
        self.extra_logprobs = 0
        """How many log-probs too many (or too few) an answer has."""
        self.numbered: Json | None = None
        """What every choice has in place of its own index."""
        self.version: str | None = "7"
        self.tool_call: Json | None = None
        """{"name", "arguments"}: every reply of chat/completions calls that tool, after what it says."""
        self.vocabulary: int | str | None = None
        self.heeds: Sequence[str] = ()
        self.prompt_tokens: list[Any] | None = None
        self.gap: asyncio.Event | None = None
        """Without it set, a stream stops after its first chunk."""
        self.end: asyncio.Event | None = None
        """Without it set, a stream does not end after its last event."""
        self.padding = ""
        """Added to every chunk of a stream, of which there are then `chunks` more."""
        self.chunks = 0
        self.defaults: Json = {}
        """What it samples with where a request names nothing, or null, as vLLM does by a model's generation_config.json."""
        self.cut_bytes = 0
        """A stream is written in pieces of so many bytes; 0: an event at a time."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    @property
    def sampled_with(self) -> list[Json]:
        """For each request the parameters that its reply was drawn with."""
        return [self.defaults | {name: body[name] for name in self.defaults if body.get(name) is not None} for body in self.requests]

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=1 << 27)
        own: dict[str, Handler] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/v1/embeddings": self._embeddings,
            "/v1/messages/count_tokens": self._count,
        }
        for path, handler in {**own, **self.routes}.items():
            app.router.add_post(path, handler)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
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

    async def _embeddings(self, request: web.Request) -> web.Response:
        self.requests.append(json.loads(await request.read()))
        self.asked.set()
        if self.hold is not None:
            await self.hold.wait()
        card = {"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}
        return web.json_response({"object": "list", "data": [card], "model": "e", "usage": {"prompt_tokens": 2, "total_tokens": 2}})

    async def _count(self, request: web.Request) -> web.Response:
        self.requests.append(json.loads(await request.read()))
        self.headers.append(request.headers)
        return web.json_response({"input_tokens": 5})

    async def _completions(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.requests.append(body)
        prompts: list[str] = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        choices: list[Json] = []
        for index, prompt in enumerate(prompts):
            text = prompt[::-1]
            choice: Json = {"index": index, "text": text, "finish_reason": "stop", "logprobs": None}
            if body.get("logprobs") is not None:
                choice["logprobs"] = {"tokens": list(text), "token_logprobs": [self.logprob] * len(text), "top_logprobs": None}
            if body.get("return_token_ids"):
                choice |= {"token_ids": [ord(t) for t in text], "prompt_token_ids": [ord(t) for t in prompt]}
            choices.append(choice)
        return web.json_response({"id": "cmpl-1", "object": "text_completion", "created": 0, "model": body["model"], "choices": choices})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if body.get("top_logprobs") == FIELDS["top_logprobs"]:
            self.probes += 1
            top = [{"token": token, "logprob": logit / body["temperature"] - 1.0} for token, logit in (("a", 0.0), ("b", -1.0))]
            return web.json_response({"choices": [{"message": {"content": "a"}, "logprobs": {"content": [{"top_logprobs": top}]}}]})
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
        if self.refused and self.refused in json.dumps(body):
            return web.json_response({"error": {"message": f"cannot be read: {json.dumps(body)}"}}, status=400)
        if self.redirect:
            return web.Response(status=307, headers={"Location": self.redirect})
        if self.status != 200:
            return web.json_response({"error": {"message": "told to fail", "type": "server_error"}}, status=self.status)
        headers = CIMultiDict({conventions.HEADER_MODEL_VERSION: self.version} if self.version else {})
        if self.vocabulary is not None:
            headers[conventions.HEADER_VOCABULARY] = str(self.vocabulary)
        for each in self.heeds:
            headers.add(conventions.HEADER_SAMPLING, each)
        if body.get("stream"):
            return await self._stream(request, body, headers)
        choices = [self._choice(body, index, self.reply(body["messages"], index), "message") for index in range(body.get("n", 1))]
        made = sum(len(choice["message"]["content"]) for choice in choices)
        answer = {
            **self._head(body, "chat.completion"),
            "choices": choices,
            "usage": {"prompt_tokens": 3, "completion_tokens": made, "total_tokens": 3 + made},
        }
        if self.cut_answers:
            return await self._cut(request, json.dumps(answer).encode())
        return web.json_response(answer, headers=headers)

    async def _cut(self, request: web.Request, whole: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "application/json", "content-length": str(len(whole))})
        await response.prepare(request)
        await response.write(whole[: len(whole) // 2])
        assert request.transport is not None
        request.transport.close()
        return response

    async def _stream(self, request: web.Request, body: Json, headers: CIMultiDict[str]) -> web.StreamResponse:
        response = web.StreamResponse(headers=CIMultiDict(headers, **{"content-type": "text/event-stream"}))
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
                await self._write(response, b"data: " + json.dumps({**head, "choices": [choice]}, ensure_ascii=False).encode() + b"\n\n")
                sent += 1
                if self.gap is not None:
                    try:
                        await self.gap.wait()
                    except asyncio.CancelledError:
                        self.cancelled += 1
                        raise
        for _ in range(self.chunks):
            choice = {"index": 0, "delta": {"content": self.padding}, "finish_reason": None}
            await response.write(
                b"data: " + json.dumps({**self._head(body, "chat.completion.chunk", first=False), "choices": [choice]}).encode() + b"\n\n"
            )
        await response.write(b"data: [DONE]\n\n")
        try:
            if self.end is not None:
                await self.end.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        await response.write_eof()
        return response

    async def _write(self, response: web.StreamResponse, event: bytes) -> None:
        for at in range(0, len(event), self.cut_bytes or len(event)):
            await response.write(event[at : at + (self.cut_bytes or len(event))])

    def _head(self, body: Json, kind: str, *, first: bool = True) -> Json:
        head: Json = {"id": "chatcmpl-1", "object": kind, "created": 0, "model": body["model"]}
        if body.get("return_token_ids") and first:
            head["prompt_token_ids"] = self.prompt_tokens if self.prompt_tokens is not None else self.prompt_ids(body["messages"])
        return head

    def _choice(self, body: Json, index: int, text: str, said: str, finish: str | None = "stop") -> Json:
        number = {"index": index} if self.numbered is None else self.numbered
        choice: Json = {**number, said: {"role": "assistant", "content": text}, "finish_reason": finish, "logprobs": None}
        if self.tool_call is not None and finish:
            function = {**self.tool_call, "arguments": json.dumps(self.tool_call["arguments"])}
            choice[said]["tool_calls"] = [{"index": 0, "id": "call_1", "type": "function", "function": function}]
            choice["finish_reason"] = "tool_calls"
        if body.get("logprobs"):
            sampled = text + "x" * self.extra_logprobs if self.extra_logprobs >= 0 else text[: self.extra_logprobs]
            choice["logprobs"] = {"content": [{"token": t, "logprob": self.logprob, "bytes": None, "top_logprobs": []} for t in sampled]}
        if body.get("return_token_ids"):
            choice["token_ids"] = [ord(t) for t in text]
        return choice


@contextmanager
def in_a_thread(server: ModelServer) -> Generator[ModelServer]:
    """Run a server in its own thread, for tests that wait for commands."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(300)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(300)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
