"""A model server that samples at random and records its samples: four protocols, streamed or not, with injected faults.

Token ids are the code points of the text, so that a reply in an agent's history has its sampled ids, as with a faithful chat template; a
tool call has random ids, recorded by the id of the call. `Truth` is the record that stored tokens are compared with. The header `x-fault`
injects a fault. The model DRIFTING ends its replies in chat/completions with a token, and its template writes them otherwise than
they were sampled. It takes the prompt's token ids beside the messages, and has /tokenize.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from aiohttp import web

Json = dict[str, Any]
ALPHABET: Final = 'abcdefghijklmnopqrstuvwxyz 0123456789"\\\n,{}äßéñ漢字あ😀🦆\u2028'
OPEN, CLOSE = 1, 2
DRIFTING: Final = "drifting"
FAULTS: Final = ("error", "cut", "hold", "logprobs_length", "logprobs_nan", "ids_negative", "no_ids")
"""Injected faults: HTTP 500, a stream cut in the middle, no response, invalid log-probs, invalid ids, no ids."""
MAX_PIECE_BYTES: Final = 40


class Sampled(NamedTuple):
    """One sampled choice of one call."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    fault: str


@dataclass
class Truth:
    """The record of samples, by (response id, choice)."""

    sampled: dict[tuple[str, int], Sampled] = field(default_factory=dict[tuple[str, int], Sampled])
    tools: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    """{id of a tool call: its token ids}."""
    calls: int = 0
    """Number of requests, including those with faults."""


@dataclass
class Reply:
    """One choice, independent of the protocol."""

    text: str
    ids: list[int]
    logprobs: list[float]
    tool: Json | None = None


class Server:
    """Serves on `url` between `start` and `stop`."""

    def __init__(self, seed: int) -> None:
        self.truth = Truth()
        self.url = ""
        self._chance = random.Random(seed)
        self._number = itertools.count(1)
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen."""
        app = web.Application(client_max_size=64 << 20)
        for path, serve in PROTOCOLS.items():
            app.router.add_post(f"/v1/{path}", self._handler(serve))
        app.router.add_post("/tokenize", self._tokenize)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _handler(self, serve: Protocol) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            request_body = json.loads(await request.read())
            own = "traceparent" not in request.headers  # a question of the proxy's own, which is nobody's call
            self.truth.calls += not own
            fault = request.headers.get("x-fault", "")
            fault = "" if fault == "cut" and not request_body.get("stream") else fault
            if fault == "error":
                return web.json_response({"error": {"message": "injected fault"}}, status=500)
            name = f"{serve.prefix}{next(self._number)}"
            prompt = serve.prompt(self, request_body)
            drifts = serve.prompt is _chat_prompt and request_body["model"] == DRIFTING
            replies = [self._reply(bool(request_body.get("tools")), drifts) for _ in range(request_body.get("n") or 1)]
            for choice, reply in enumerate(replies if not own else ()):
                self.truth.sampled[name, choice] = Sampled(prompt, reply.ids, reply.logprobs, fault)
            if fault == "hold":
                await asyncio.sleep(3600)
            with_ids = request_body.get("return_token_ids") and fault != "no_ids"
            given = [_broken(reply, fault) for reply in replies]
            events = list(serve.stream(name, prompt if with_ids else None, given)) if request_body.get("stream") else None
            if events is None:
                return web.json_response(serve.whole(name, prompt if with_ids else None, given))
            return await self._stream(request, events, fault)

        return handle

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = json.loads(await request.read())
        return web.json_response({"tokens": _drifting_prompt(self, asked["messages"], asked["add_generation_prompt"])})

    def _reply(self, tools: bool, drifts: bool) -> Reply:
        chance = self._chance
        text = "".join(chance.choices(ALPHABET, k=chance.randint(1, 40)))
        ids = [ord(letter) for letter in text]
        tool = None
        if tools and chance.random() < 0.5:
            tool = {"id": f"call_{chance.getrandbits(64):x}", "name": "look", "arguments": json.dumps({"for": text})}
            ids = [0x2F000 + chance.randrange(500) for _ in range(chance.randint(3, 30))]
            self.truth.tools[tool["id"]] = ids
        ids = [*ids, CLOSE] if drifts else ids
        return Reply("" if tool else text, ids, [-chance.expovariate(1.0) for _ in ids], tool)

    async def _stream(self, request: web.Request, events: list[bytes], fault: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        body = b"".join(events[: len(events) // 2] if fault == "cut" else events)
        at = 0
        while at < len(body):  # in chunks that split events and characters
            size = self._chance.randint(1, MAX_PIECE_BYTES) if len(body) < 2000 else 600
            await response.write(body[at : at + size])
            at += size
        if fault == "cut" and request.transport is not None:
            request.transport.close()
        return response

    # --- token ids of a prompt

    def input_ids(self, text: Any) -> list[int]:
        """Return the ids of a message that the model did not write."""
        return [OPEN, *map(ord, text if isinstance(text, str) else json.dumps(text)), CLOSE]

    def sampled_ids(self, text: str, tools: list[str]) -> list[int]:
        """Return the ids of a message that the model wrote, as they were sampled."""
        return [OPEN, *map(ord, text), *(number for tool in tools for number in self.truth.tools[tool])]


def _broken(reply: Reply, fault: str) -> Reply:
    if fault == "logprobs_length":
        return Reply(reply.text, reply.ids, reply.logprobs[1:], reply.tool)
    if fault == "logprobs_nan":
        return Reply(reply.text, reply.ids, [float("nan"), *reply.logprobs[1:]], reply.tool)
    return Reply(reply.text, [-1, *reply.ids[1:]], reply.logprobs, reply.tool) if fault == "ids_negative" else reply


def _pieces(reply: Reply, with_ids: bool) -> Iterator[tuple[str, list[int], list[float]]]:
    """Split a reply into parts of a stream: a few characters with their ids and log-probs."""
    size = max(1, len(reply.ids) // 4)
    for at in range(0, len(reply.ids), size):
        part = slice(at, at + size)
        yield reply.text[part], reply.ids[part] if with_ids else [], reply.logprobs[part]


def _event(payload: Json, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(payload, ensure_ascii=False)}\n\n".encode()


# --- chat/completions ---------------------------------------------------------------------------------------------


def _chat_prompt(server: Server, request_body: Json) -> list[int]:
    if request_body["model"] == DRIFTING:
        return request_body.get("prompt_token_ids") or _drifting_prompt(server, request_body["messages"], True)
    ids: list[int] = []
    for message in request_body["messages"]:
        own = message["role"] == "assistant"
        tools = [call["id"] for call in message.get("tool_calls") or ()]
        ids += server.sampled_ids(message["content"] or "", tools) if own else server.input_ids(message["content"])
    return [*ids, OPEN]


def _drifting_prompt(server: Server, messages: list[Json], generation_prompt: bool) -> list[int]:
    """Render replies with a space behind them, and tool calls by their arguments' text."""
    ids: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ())
            ids += server.input_ids(f"{message['content'] or ''}{calls} ")
        else:
            ids += server.input_ids(message["content"])
    return [*ids, OPEN] if generation_prompt else ids


def _tool_call(tool: Json) -> Json:
    return {"id": tool["id"], "type": "function", "function": {"name": tool["name"], "arguments": tool["arguments"]}}


def _chat_logprobs(logprobs: list[float]) -> Json:
    return {"content": [{"token": "t", "logprob": value, "bytes": None, "top_logprobs": []} for value in logprobs]}


def _chat_whole(name: str, prompt: list[int] | None, replies: list[Reply]) -> Json:
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": r.text or None, **({"tool_calls": [_tool_call(r.tool)]} if r.tool else {})},
            "logprobs": _chat_logprobs(r.logprobs),
            "finish_reason": "tool_calls" if r.tool else "stop",
            **({"token_ids": r.ids} if prompt is not None else {}),
        }
        for index, r in enumerate(replies)
    ]
    return {"id": name, "object": "chat.completion", "created": 0, "model": "m", "choices": choices, **_prompt(prompt)}


def _prompt(prompt: list[int] | None) -> Json:
    return {} if prompt is None else {"prompt_token_ids": prompt}


def _chat_stream(name: str, prompt: list[int] | None, replies: list[Reply]) -> Iterator[bytes]:
    head: Json = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": "m"}
    yield _event({**head, **_prompt(prompt), "choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
    for index, reply in enumerate(replies):
        if reply.tool:
            delta = {"tool_calls": [{"index": 0, **_tool_call(reply.tool)}]}
            yield _event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None}]})
        for text, ids, logprobs in _pieces(reply, prompt is not None):
            choice: Json = {"index": index, "delta": {"content": text}, "logprobs": _chat_logprobs(logprobs), "finish_reason": None}
            yield _event({**head, "choices": [{**choice, **({"token_ids": ids} if ids else {})}]})
        yield _event({**head, "choices": [{"index": index, "delta": {}, "finish_reason": "tool_calls" if reply.tool else "stop"}]})
    yield b"data: [DONE]\n\n"


# --- completions --------------------------------------------------------------------------------------------------


def _text_whole(name: str, prompt: list[int] | None, replies: list[Reply]) -> Json:
    choices = [
        {
            "index": index,
            "text": r.text,
            "finish_reason": "stop",
            "logprobs": {"tokens": ["t"] * len(r.logprobs), "token_logprobs": r.logprobs},
            **({"token_ids": r.ids, "prompt_token_ids": prompt} if prompt is not None else {}),
        }
        for index, r in enumerate(replies)
    ]
    return {"id": name, "object": "text_completion", "created": 0, "model": "m", "choices": choices}


def _text_stream(name: str, prompt: list[int] | None, replies: list[Reply]) -> Iterator[bytes]:
    for index, reply in enumerate(replies):
        for place, (text, ids, logprobs) in enumerate(_pieces(reply, prompt is not None)):
            choice: Json = {"index": index, "text": text, "finish_reason": None, "logprobs": {"token_logprobs": logprobs}}
            choice |= {"token_ids": ids} if prompt is not None else {}
            choice |= _prompt(prompt) if place == 0 else {}
            yield _event({"id": name, "object": "text_completion", "model": "m", "choices": [choice]})
        yield _event(
            {"id": name, "object": "text_completion", "model": "m", "choices": [{"index": index, "text": "", "finish_reason": "stop"}]}
        )
    yield b"data: [DONE]\n\n"


# --- messages (Anthropic) -----------------------------------------------------------------------------------------


def _messages_prompt(server: Server, request_body: Json) -> list[int]:
    ids = server.input_ids(request_body["system"]) if request_body.get("system") else []
    for message in request_body["messages"]:
        blocks = message["content"] if isinstance(message["content"], list) else [{"type": "text", "text": message["content"]}]
        if message["role"] == "assistant":
            text = "".join(block["text"] for block in blocks if block["type"] == "text")
            ids += server.sampled_ids(text, [block["id"] for block in blocks if block["type"] == "tool_use"])
        else:
            ids += [number for block in blocks for number in server.input_ids(block.get("text", block.get("content")))]
    return [*ids, OPEN]


def _message(name: str, reply: Reply, **more: Any) -> Json:
    tool = reply.tool
    block: Json = (
        {"type": "tool_use", "id": tool["id"], "name": tool["name"], "input": json.loads(tool["arguments"])}
        if tool
        else {"type": "text", "text": reply.text}
    )
    head = {"id": name, "type": "message", "role": "assistant", "model": "m", "content": [block], "stop_sequence": None}
    return {
        **head,
        "stop_reason": "tool_use" if tool else "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": len(reply.ids)},
        **more,
    }


def _sampled(reply: Reply, prompt: list[int] | None) -> Json:
    return {"logprobs": {"token_logprobs": reply.logprobs}, **({"token_ids": reply.ids} if prompt is not None else {})}


def _message_whole(name: str, prompt: list[int] | None, replies: list[Reply]) -> Json:
    return {**_message(name, replies[0]), **_prompt(prompt), **_sampled(replies[0], prompt)}


def _message_stream(name: str, prompt: list[int] | None, replies: list[Reply]) -> Iterator[bytes]:
    (reply,) = replies
    whole = _message(name, reply)
    yield _event({"type": "message_start", "message": {**whole, "content": [], "stop_reason": None, **_prompt(prompt)}}, "message_start")
    (block,) = whole["content"]
    start = {**block, "input": {}} if reply.tool else {**block, "text": ""}
    yield _event({"type": "content_block_start", "index": 0, "content_block": start}, "content_block_start")
    text = reply.tool["arguments"] if reply.tool else reply.text
    kind, name_of = ("input_json_delta", "partial_json") if reply.tool else ("text_delta", "text")
    for at in range(0, len(text), 7):
        delta = {"type": kind, name_of: text[at : at + 7]}
        yield _event({"type": "content_block_delta", "index": 0, "delta": delta}, "content_block_delta")
    yield _event({"type": "content_block_stop", "index": 0}, "content_block_stop")
    end = {"type": "message_delta", "delta": {"stop_reason": whole["stop_reason"]}, "usage": {"output_tokens": len(reply.ids)}}
    yield _event({**end, **_sampled(reply, prompt)}, "message_delta")
    yield _event({"type": "message_stop"}, "message_stop")


# --- responses ----------------------------------------------------------------------------------------------------


def _responses_prompt(server: Server, request_body: Json) -> list[int]:
    ids = server.input_ids(request_body["instructions"]) if request_body.get("instructions") else []
    asked: Any = request_body["input"]
    items: list[Any] = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    for item in items:
        if item.get("type") == "function_call":
            ids += server.sampled_ids("", [item["call_id"]])
        elif item.get("type") == "function_call_output":
            ids += server.input_ids(item["output"])
        elif item["role"] == "assistant":
            ids += server.sampled_ids("".join(part["text"] for part in item["content"]), [])
        else:
            ids += server.input_ids(item["content"])
    return [*ids, OPEN]


def _response(name: str, reply: Reply) -> Json:
    tool = reply.tool
    item: Json = (
        {"type": "function_call", "id": f"fc_{name}", "call_id": tool["id"], "name": tool["name"], "arguments": tool["arguments"]}
        if tool
        else {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": reply.text, "annotations": []}]}
    )
    return {"id": name, "object": "response", "created_at": 0, "model": "m", "status": "completed", "output": [item], "tools": []}


def _response_whole(name: str, prompt: list[int] | None, replies: list[Reply]) -> Json:
    return {**_response(name, replies[0]), **_prompt(prompt), **_sampled(replies[0], prompt)}


def _response_stream(name: str, prompt: list[int] | None, replies: list[Reply]) -> Iterator[bytes]:
    (reply,) = replies
    whole = _response_whole(name, prompt, replies)
    begun = {**_response(name, reply), "output": [], "status": "in_progress"}
    yield _event({"type": "response.created", "response": begun}, "response.created")
    for at in range(0, len(reply.text), 7):
        yield _event({"type": "response.output_text.delta", "delta": reply.text[at : at + 7]}, "response.output_text.delta")
    yield _event({"type": "response.completed", "response": whole}, "response.completed")


class Protocol(NamedTuple):
    """The functions that serve one route."""

    prefix: str
    """Prefix of its response ids."""
    prompt: Callable[[Server, Json], list[int]]
    whole: Callable[[str, list[int] | None, list[Reply]], Json]
    stream: Callable[[str, list[int] | None, list[Reply]], Iterator[bytes]]


PROTOCOLS: Final = {
    "chat/completions": Protocol("chatcmpl-", _chat_prompt, _chat_whole, _chat_stream),
    "completions": Protocol("cmpl-", lambda _, request_body: [ord(letter) for letter in request_body["prompt"]], _text_whole, _text_stream),
    "messages": Protocol("msg_", _messages_prompt, _message_whole, _message_stream),
    "responses": Protocol("resp_", _responses_prompt, _response_whole, _response_stream),
}
