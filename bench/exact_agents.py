"""Random agents in five protocols: several turns, tools, n > 1, retries, edited history, concurrent conversations, injected faults.

A conversation is a list of protocol-independent messages; each protocol encodes them as requests and parses the replies. Received replies
are compared with the samples: the proxy must not change them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import aiohttp

from bench.exact_server import FAULTS, Json

GOOGLE: Final = "generateContent"
RETRY_HEADER: Final = "x-stainless-retry-count"
HOLD_SECONDS: Final = 0.05
IMAGE: Final = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


class Turn(NamedTuple):
    """A message of the user, the system, a tool (with the call that it answers), or the model (text, or a tool call)."""

    role: str
    text: str = ""
    tool: Json | None = None
    """{id, name, arguments} of the model's tool call, or of the call that this message answers."""
    image: bool = False


class Received(NamedTuple):
    """A response as the agent parsed it."""

    id: str
    replies: list[Turn]


def _events(body: bytes) -> list[Json]:
    lines = [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]  # not splitlines(), which also splits at U+2028
    return [json.loads(line) for line in lines if line != "[DONE]"]


# --- requests and replies of each protocol -----------------------------------------------------------------------


def _chat(turns: Sequence[Turn]) -> Json:
    messages: list[Json] = []
    for turn in turns:
        if turn.role == "assistant" and turn.tool:
            function = {"name": turn.tool["name"], "arguments": turn.tool["arguments"]}
            call = {"id": turn.tool["id"], "type": "function", "function": function}
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif turn.role == "tool" and turn.tool:
            messages.append({"role": "tool", "tool_call_id": turn.tool["id"], "content": turn.text})
        else:
            messages.append({"role": turn.role, "content": [{"type": "text", "text": turn.text}, IMAGE] if turn.image else turn.text})
    return {"messages": messages}


def _chat_read(body: bytes, stream: bool) -> Received:
    if not stream:
        whole = json.loads(body)
        return Received(whole["id"], [_chat_turn(choice["message"]) for choice in whole["choices"]])
    found: dict[int, Json] = {}
    name = ""
    for event in _events(body):
        name = event["id"]
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {"content": "", "tool_calls": []})
            own["content"] += choice["delta"].get("content") or ""
            own["tool_calls"] += choice["delta"].get("tool_calls") or []
    return Received(name, [_chat_turn(found[index]) for index in sorted(found)])


def _chat_turn(message: Json) -> Turn:
    calls = message.get("tool_calls")
    return Turn("assistant", message["content"] or "", {"id": calls[0]["id"], **calls[0]["function"]} if calls else None)


def _text(turns: Sequence[Turn]) -> Json:
    return {"prompt": "".join(turn.text if turn.role == "assistant" else f"<{turn.role}>{turn.text}</>" for turn in turns)}


def _text_read(body: bytes, stream: bool) -> Received:
    payloads = _events(body) if stream else [json.loads(body)]
    found: dict[int, str] = {}
    for payload in payloads:
        for choice in payload["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return Received(payloads[0]["id"], [Turn("assistant", found[index]) for index in sorted(found)])


def _messages(turns: Sequence[Turn]) -> Json:
    messages: list[Json] = []
    for turn in turns:
        if turn.role == "assistant" and turn.tool:
            used = {"type": "tool_use", "id": turn.tool["id"], "name": "look", "input": json.loads(turn.tool["arguments"])}
            messages.append({"role": "assistant", "content": [used]})
        elif turn.role == "tool" and turn.tool:
            result = {"type": "tool_result", "tool_use_id": turn.tool["id"], "content": turn.text}
            messages.append({"role": "user", "content": [result]})
        elif turn.role != "system":
            messages.append({"role": turn.role, "content": turn.text})
    system = "".join(turn.text for turn in turns if turn.role == "system")
    return {"messages": messages, "max_tokens": 100, **({"system": system} if system else {})}


def _messages_read(body: bytes, stream: bool) -> Received:
    if not stream:
        whole = json.loads(body)
        (block,) = whole["content"]
        if block["type"] == "text":
            return Received(whole["id"], [Turn("assistant", block["text"])])
        return Received(whole["id"], [Turn("assistant", "", {"id": block["id"], "name": "look", "arguments": json.dumps(block["input"])})])
    name, text, tool = "", "", None
    for event in _events(body):
        if event["type"] == "message_start":
            name = event["message"]["id"]
        elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            tool = event["content_block"]["id"]
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "") or event["delta"].get("partial_json", "")
    return Received(name, [Turn("assistant", "", {"id": tool, "name": "look", "arguments": text}) if tool else Turn("assistant", text)])


def _responses(turns: Sequence[Turn]) -> Json:
    items: list[Json] = []
    for turn in turns:
        if turn.role == "assistant" and turn.tool:
            call = {"call_id": turn.tool["id"], "name": turn.tool["name"], "arguments": turn.tool["arguments"]}
            items.append({"type": "function_call", **call})
        elif turn.role == "tool" and turn.tool:
            items.append({"type": "function_call_output", "call_id": turn.tool["id"], "output": turn.text})
        elif turn.role == "assistant":
            items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": turn.text}]})
        elif turn.role != "system":
            items.append({"role": turn.role, "content": turn.text})
    system = "".join(turn.text for turn in turns if turn.role == "system")
    return {"input": items, **({"instructions": system} if system else {})}


def _responses_read(body: bytes, stream: bool) -> Received:
    whole = next(e["response"] for e in _events(body) if e["type"] == "response.completed") if stream else json.loads(body)
    (item,) = whole["output"]
    if item["type"] == "message":
        return Received(whole["id"], [Turn("assistant", item["content"][0]["text"])])
    return Received(whole["id"], [Turn("assistant", "", {"id": item["call_id"], "name": item["name"], "arguments": item["arguments"]})])


def _google(turns: Sequence[Turn]) -> Json:
    contents: list[Json] = []
    for turn in turns:
        part: Json = {"text": turn.text}
        if turn.tool and turn.role == "assistant":
            part = {"functionCall": {"id": turn.tool["id"], "name": turn.tool["name"], "args": json.loads(turn.tool["arguments"])}}
        elif turn.tool:
            part = {"functionResponse": {"id": turn.tool["id"], "name": turn.tool["name"], "response": {"output": turn.text}}}
        image = [{"inlineData": {"mimeType": "image/png", "data": "AAAA"}}] if turn.image else []
        if turn.role != "system":
            contents.append({"role": "model" if turn.role == "assistant" else "user", "parts": [part, *image]})
    system = "".join(turn.text for turn in turns if turn.role == "system")
    return {"contents": contents, **({"systemInstruction": {"parts": [{"text": system}]}} if system else {})}


def _google_read(body: bytes, stream: bool) -> Received:
    payloads = _events(body) if stream else [json.loads(body)]
    found: dict[int, Turn] = {}
    for candidate in (each for payload in payloads for each in payload["candidates"]):
        turn = found.get(candidate["index"], Turn("assistant"))
        for part in candidate["content"]["parts"]:
            if "functionCall" in part:
                call = part["functionCall"]
                turn = turn._replace(tool={"id": call["id"], "name": call["name"], "arguments": json.dumps(call["args"])})
            else:
                turn = turn._replace(text=turn.text + part["text"])
        found[candidate["index"]] = turn
    return Received(payloads[0]["responseId"], [found[index] for index in sorted(found)])


class Options(NamedTuple):
    """What a request asks for beside its messages."""

    stream: bool
    tools: bool
    n: int
    logprobs: bool


_NAME: Final = "look"


def _openai_options(options: Options) -> Json:
    function = {"name": _NAME, "parameters": {"type": "object"}}
    tools = {"tools": [{"type": "function", "name": _NAME, "function": function}]} if options.tools else {}
    return {"model": "m", "stream": options.stream, **tools, **({"n": options.n} if options.n > 1 else {})}


def _chat_options(options: Options) -> Json:
    return _openai_options(options) | ({"logprobs": True} if options.logprobs else {})


def _text_options(options: Options) -> Json:
    return _openai_options(options) | ({"logprobs": 1} if options.logprobs else {})


def _google_options(options: Options) -> Json:
    function = {"name": _NAME, "parameters": {"type": "OBJECT"}}
    tools = {"tools": [{"functionDeclarations": [function]}]} if options.tools else {}
    return {**tools, **({"generationConfig": {"candidateCount": options.n}} if options.n > 1 else {})}


class Codec(NamedTuple):
    """Encoder of requests and parser of responses of one protocol."""

    body: Callable[[Sequence[Turn]], Json]
    options: Callable[[Options], Json]
    """The other fields of the request."""
    read: Callable[[bytes, bool], Received]
    choices: bool
    """Whether n > 1 is supported."""
    tools: bool = True


CODECS: Final = {
    "chat/completions": Codec(_chat, _chat_options, _chat_read, choices=True),
    "completions": Codec(_text, _text_options, _text_read, choices=True, tools=False),
    "messages": Codec(_messages, _openai_options, _messages_read, choices=False),
    "responses": Codec(_responses, _openai_options, _responses_read, choices=False),
    GOOGLE: Codec(_google, _google_options, _google_read, choices=True),
}


class Agent:
    """Runs the conversations of one attempt at `url` (the attempt's base URL); `calls` counts requests."""

    def __init__(self, session: aiohttp.ClientSession, url: str, chance: random.Random, *, faults: float) -> None:
        self._session, self._url, self._chance, self._faults = session, url, chance, faults
        self.calls = 0
        self.received: list[tuple[Received, str]] = []
        """Complete responses with their protocol's path."""

    async def run(self) -> None:
        """Run one to three conversations, in sequence or concurrently."""
        talks = [self._talk(self._chance.choice(list(CODECS))) for _ in range(self._chance.choice((1, 1, 1, 2, 3)))]
        if self._chance.random() < 0.3:
            await asyncio.gather(*talks)
        else:
            for talk in talks:
                await talk

    async def _talk(self, path: str) -> None:
        chance, codec = self._chance, CODECS[path]
        turns = [Turn("system", f"You are {chance.random()}. ")] if chance.random() < 0.7 else []
        turns.append(Turn("user", self._words(), image=chance.random() < 0.1))
        for _ in range(chance.choice((1, 2, 3, 4, 6, 9))):
            answer = await self._ask(path, codec, turns)
            if answer is None:
                continue
            reply = chance.choice(answer.replies)
            turns = [*turns, reply]
            turns.append(Turn("tool", self._words(), reply.tool) if reply.tool else Turn("user", self._words()))
            turns = self._edited(turns)

    def _words(self) -> str:
        return "".join(self._chance.choices('ab é漢😀\n"', k=self._chance.choice((0, 1, 5, 20))))

    def _edited(self, turns: list[Turn]) -> list[Turn]:
        """Edit the history at random: drop a middle part, change a message, or branch from an earlier one."""
        first = 1 if turns[0].role == "system" else 0
        places = [n for n, turn in enumerate(turns) if turn.role == "user" and n > first]
        if len(places) < 2 or self._chance.random() > 0.15:
            return turns
        place = self._chance.choice(places[:-1])
        kind = self._chance.randrange(3)
        if kind == 0:
            return [*turns[:place], Turn("user", self._words()), *turns[place + 1 :]]
        return (
            [*turns[: first + 1], *turns[places[-2] - 1 :]]
            if kind == 1 and turns[places[-2] - 1].tool is None
            else [
                *turns[:place],
                Turn("user", self._words()),
            ]
        )

    async def _ask(self, path: str, codec: Codec, turns: Sequence[Turn]) -> Received | None:
        """Make one call, retried after a failure as SDKs do; None if it has no usable response."""
        chance = self._chance
        options = Options(
            stream=chance.random() < 0.5,
            tools=codec.tools and (chance.random() < 0.4 or any(turn.tool for turn in turns)),
            n=chance.choice((2, 3)) if codec.choices and chance.random() < 0.15 else 1,
            logprobs=chance.random() < 0.3,
        )
        fault = chance.choice(FAULTS) if chance.random() < self._faults else ""
        raw = json.dumps(codec.body(turns) | codec.options(options), ensure_ascii=False).encode()
        answer = await self._send(path, raw, options.stream, fault, 0)
        if fault in ("error", "hold", "cut") and answer is None:
            answer = await self._send(path, raw, options.stream, "", 1)
        return answer

    async def _send(self, path: str, raw: bytes, stream: bool, fault: str, retry: int) -> Received | None:
        headers = {"content-type": "application/json", "x-fault": fault, RETRY_HEADER: str(retry)}
        self.calls += 1
        patience = aiohttp.ClientTimeout(total=HOLD_SECONDS if fault == "hold" else 300.0)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.post(self._address(path, stream), data=raw, headers=headers, timeout=patience) as response:
                content = await response.read()
                if response.status == 200:
                    answer = CODECS[path].read(content, stream)
                    if b"token_ids" in content:
                        raise AssertionError(f"{path}: an agent that did not ask for token ids got some")
                    self.received.append((answer, path))
                    return answer
        return None

    def _address(self, path: str, stream: bool) -> str:
        if path != GOOGLE:
            return f"{self._url}/{path}"
        return f"{self._url.removesuffix('/v1')}/v1beta/models/m:{'streamGenerateContent?alt=sse' if stream else path}"
