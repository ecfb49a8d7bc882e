"""Pass a model server's answer to the agent, without the fields that the agent did not request, and record it in the call.

The connection of a client that does not read is closed after CLIENT_SECONDS; what was sampled stays recorded.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from agl_otel.net.posting import Answer
from agl_otel.proxy.agent import Agent
from agl_otel.proxy.dialects import is_bare, take_out
from agl_otel.proxy.outgoing import OVERSIZED, oversized, whole
from agl_otel.proxy.recorder import Call
from agl_otel.proxy.reply import (
    MAX_BRACKETS,
    MAX_COMMAS,
    Events,
    Json,
    data_of,
    encoded,
    is_crowded,
    is_crowded_event,
    parse_object,
    payload_of,
    with_payload,
)
from agl_otel.spans.tolerant import whole_of
from agl_otel_hook import conventions

CLIENT_SECONDS: Final = 120.0  # the longest that a client may read nothing of a pending answer
ANSWER_BYTES: Final = 256 << 20  # 32,000 tokens with twenty log-probs each are some 50 MB
EVENTS_AT_ONCE: Final = 256  # then control is yielded to other calls: a few milliseconds
_BUFFERED_BYTES: Final = 32 << 10  # below this a write never blocks: half of asyncio's high-water mark
NOT_PASSED: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "content-encoding", "accept-encoding"),
    }
)
"""Hop-by-hop headers, and those that this proxy sets itself."""
_LAST: Final = ("message_stop", "response.completed", "response.incomplete", "response.failed")
"""Types of the last event of a stream, as is [DONE]; clients may stop reading there."""
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_MOST_VALUES: Final = f"{MAX_BRACKETS} JSON objects and lists or {MAX_COMMAS} commas"
_LITELLMS: Final = ("x-litellm-", "llm_provider-")
Edit = Callable[[bytes], bytes]


async def pass_on(
    agent: Agent,
    response: Answer | aiohttp.ClientResponse,
    added: frozenset[str],
    call: Call,
    *,
    client_seconds: float,
    most: int = ANSWER_BYTES,
    body: bytes | None = None,
    write_down: Callable[[Call], None] | None = None,
    translated: Edit | None = None,
) -> None:
    """Pass the answer to the agent and record it in `call`. Raises RefusedAnswerError, aiohttp.ClientError, OSError.

    Args:
        added: fields that the agent did not request.
        most: the largest answer accepted, in bytes.
        body: the answer, if it was read already.
        write_down: called with the call before its last byte is sent, so that an answer that arrived in full is on disk.
        translated: edits an answer of litellm's.
    """
    call.status = response.status
    call.first_byte = (response.began if isinstance(response, Answer) else 0) or time.time_ns()
    version = response.headers.get(conventions.HEADER_MODEL_VERSION)
    call.model_version, call.names_version = call.model_version if version is None else version, version is not None
    said = response.headers.getall(conventions.HEADER_SAMPLING, ())
    call.honoured = ",".join(said) if said else None
    vocabulary = response.headers.get(conventions.HEADER_VOCABULARY)
    call.vocabulary = max(0, whole_of(vocabulary)) or None if vocabulary else None
    if response.content_type == "text/event-stream":
        await _stream(agent, response, added, call, client_seconds, most, write_down, translated)
        return
    body = await whole(response, most) if body is None else body
    payload = parse_object(body)
    if payload is not None:
        call.dialect.take(call.reply, payload)
        if take_out(payload, added):
            body = encoded(payload)
    elif is_crowded(body):
        raise oversized(f"its answer has more than {_MOST_VALUES}")
    if translated is not None:
        body = translated(body)
    if write_down is not None:
        write_down(call)
    headers = passed(response, own=translated is None)
    if len(body) < _BUFFERED_BYTES:
        await agent.answer(response.status, headers, body)
        call.delivered = True
        return
    await agent.begin(response.status, headers, len(body))
    if await _write(agent, body, call, client_seconds):
        call.delivered = True
        await agent.end()


async def _stream(
    agent: Agent,
    response: Answer | aiohttp.ClientResponse,
    added: frozenset[str],
    call: Call,
    client_seconds: float,
    most: int,
    write_down: Callable[[Call], None] | None,
    translated: Edit | None,
) -> None:
    await agent.begin(response.status, passed(response, own=translated is None))
    events, content = Events(), response.content
    assert content is not None, "a stream is not read as a whole"
    while True:
        try:
            piece = await content.readany()
            most -= len(piece)
            ready = await _take(events.feed(piece) if piece else [events.rest()], added, call) if most >= 0 else None
        except (aiohttp.ClientError, OSError):
            call.incomplete = "upstream_error"
            agent.break_off()
            return
        if ready is None:
            call.incomplete = OVERSIZED
            agent.break_off()
            return
        last = not piece or call.reply.ended
        if write_down is not None and last:
            write_down(call)
        if translated is not None:
            ready = translated(ready)
        if ready and not await _write(agent, ready, call, client_seconds):
            return
        call.delivered = call.delivered or (last and call.no_whole_reply is None)  # clients may close after the last event
        if not piece:
            break
    await agent.end()


async def _take(events: Sequence[bytes], added: frozenset[str], call: Call) -> bytes | None:
    """Record events; return them as the agent sees them, or None if one is too large to be read."""
    shown: list[bytes] = []
    for number, event in enumerate(events, 1):
        if number % EVENTS_AT_ONCE == 0:
            await asyncio.sleep(0)
        payload = payload_of(event)
        if payload is None and is_crowded_event(event):
            return None
        if not call.reply.ended:
            _record(event, payload, call)
        if payload is None or not take_out(payload, added):
            shown.append(event)
        elif not is_bare(payload):
            shown.append(with_payload(event, payload))
    return b"".join(shown)


def _record(event: bytes, payload: Json | None, call: Call) -> None:
    if payload is not None:
        call.dialect.take(call.reply, payload)
        call.reply.ended = payload.get("type") in _LAST
    elif data := data_of(event):
        call.reply.ended = data == b"[DONE]"
        call.reply.unreadable |= not call.reply.ended


async def _write(agent: Agent, data: bytes, call: Call, client_seconds: float) -> bool:
    """Write; if the client does not read, close its connection and return False."""
    if agent.buffered() + len(data) < _BUFFERED_BYTES:
        await agent.write(data)
        return True
    try:
        async with asyncio.timeout(client_seconds):
            await agent.write(data)
    except TimeoutError:
        call.incomplete = "client_stalled"
        agent.abort()
        return False
    return True


def passed(response: Answer | aiohttp.ClientResponse, *, own: bool = True) -> Mapping[str, str]:
    """The model server's headers that the agent receives; litellm's additions are removed unless they are the server's `own`.

    Headers with control characters, which are invalid in an answer, are left out.
    """
    headers = [(name, value) for name, value in response.headers.items() if name.lower() not in NOT_PASSED]
    if _CONTROL.search("".join(map("".join, headers))):
        headers = [(name, value) for name, value in headers if not _CONTROL.search(name + value)]
    held = CIMultiDict(headers)
    if not own:
        for name in [name for name in held if name.lower().startswith(_LITELLMS)]:
            del held[name]
    return held


def error_response(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the form that OpenAI's and Anthropic's clients display."""
    error = {"message": message, "type": "agl_otel_proxy", "param": None, "code": code}
    return web.json_response({"type": "error", "error": error}, status=status, headers=headers)
