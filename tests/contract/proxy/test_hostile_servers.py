"""Malicious model servers, which aim at the proxy's memory or its errors: other calls are served as before."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import aiohttp
import pytest

from agl_otel.proxy import answer
from agl_otel.proxy.answer import ANSWER_BYTES, EVENTS_AT_ONCE
from agl_otel.proxy.forward import Limits
from agl_otel.proxy.reply import payload_of
from agl_otel.proxy.upstream import FixedUpstreams, Upstream
from agl_otel_hook import conventions
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, proxy
from tests.otlp_receiver import OtlpReceiver

MOST = 1 << 20
PIECE = 64 << 10
JSON_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
EVENT = b'data: {"id": "r", "choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": "stop"}]}\n\n'
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
REPLY = {"id": "r", "model": "m", "choices": [CHOICE]}


class Server:
    """Answers every request with the same bytes; `sent` counts those written, `answers` the answers."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces
        self.sent = self.answers = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncGenerator[str]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        async with server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        await reader.readexactly(length)
        self.answers += 1
        with contextlib.suppress(ConnectionError):
            for piece in self._pieces:
                writer.write(piece)
                await writer.drain()
                self.sent += len(piece)
        writer.close()


def endless(head: bytes, piece: bytes) -> Iterator[bytes]:
    yield head
    for _ in range(4096):  # 256 MiB: enough to tell that nobody stopped it
        yield piece


def sized(body: bytes, extra: bytes = b"") -> list[bytes]:
    return [JSON_HEAD + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body]


async def asked(stand: Stand, *, stream: bool = False) -> tuple[int, bytes, Any]:
    body = {"model": "m", "messages": HELLO, "stream": stream}
    async with aiohttp.ClientSession() as session, session.post(f"{stand.url}{SCOPE}/v1/chat/completions", json=body) as answer:
        try:
            return answer.status, await answer.read(), answer.headers
        except aiohttp.ClientPayloadError:  # broken off, so that the client sees it
            return answer.status, b"", answer.headers


@contextlib.asynccontextmanager
async def before(server: Server, receiver: OtlpReceiver, most: int = MOST) -> AsyncGenerator[Stand]:
    async with server.serving() as url, proxy(receiver, FixedUpstreams(Upstream(url)), limits=Limits(answer_bytes=most)) as stand:
        yield stand
        assert (await stand.health())["status"] == "ok"


OVERSIZED = {
    "endless": lambda: endless(JSON_HEAD + b"Connection: close\r\n\r\n", b" " * PIECE),
    "promised": lambda: endless(JSON_HEAD + b"Content-Length: 9999999999\r\n\r\n", b" " * PIECE),
    "refused": lambda: endless(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", b" " * PIECE),
}


@pytest.mark.parametrize("kind", OVERSIZED)
async def test_an_answer_that_is_too_long_is_cut_and_its_call_incomplete(kind: str, receiver: OtlpReceiver) -> None:
    server = Server(OVERSIZED[kind]())
    async with before(server, receiver) as stand:
        status, body, _ = await asked(stand)
        assert status == 502
        assert "the proxy takes no more" in json.loads(body)["error"]["message"]
        (span,) = await stand.calls()
        assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_oversized"
        assert server.sent < 64 << 20, "it went on reading"


PACKED = gzip.compress(json.dumps(REPLY).encode(), mtime=0)


@pytest.mark.parametrize("status", [b"200 OK", b"400 Bad Request", b"503 Busy"])
@pytest.mark.parametrize("kind", [b"application/json", b"text/event-stream"])
async def test_an_answer_compressed_without_request_is_refused(status: bytes, kind: bytes, receiver: OtlpReceiver) -> None:
    """Up to a thousand times its bytes would have to be decompressed to check it."""
    head = b"HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % (status, kind, len(PACKED))
    server = Server([head + PACKED])
    async with before(server, receiver) as stand:
        answered, body, _ = await asked(stand, stream=b"event" in kind)
        error = json.loads(body)["error"]
        assert (answered, error["code"]) == (502, "upstream_packed") and "Content-Encoding: gzip" in error["message"], error
        assert "http://127.0.0.1:" in error["message"] and server.answers == 1
        (span,) = await stand.calls()
        assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_packed"


async def test_what_is_passed_through_is_not_unpacked_either(receiver: OtlpReceiver) -> None:
    server = Server(sized(PACKED, b"Content-Encoding: gzip\r\n"))
    async with before(server, receiver) as stand:
        status, said, _ = await stand.post(f"{SCOPE}/v1/messages/count_tokens", {"model": "m", "messages": HELLO})
        assert (status, said["error"]["code"]) == (502, "upstream_packed")


async def test_an_answer_may_say_that_it_is_not_packed(receiver: OtlpReceiver) -> None:
    async with before(Server(sized(json.dumps(REPLY).encode(), b"Content-Encoding: Identity\r\n")), receiver) as stand:
        assert (await asked(stand))[0] == 200


@pytest.mark.parametrize("piece", [b"data: {}\n\n" * 6000, b"x" * PIECE], ids=["events", "one event"])
async def test_a_stream_that_does_not_end_is_cut_off(piece: bytes, receiver: OtlpReceiver) -> None:
    server = Server(endless(STREAM_HEAD, piece))
    async with before(server, receiver) as stand:
        status, body, _ = await asked(stand, stream=True)
        assert (status, body) == (200, b"")
        (span,) = await stand.calls()
        assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_oversized"
        assert server.sent < 64 << 20, "it went on reading"


CROWDED = {
    "numbers": b'{"id": "r", "x": [' + b"0," * (1 << 23) + b"0]}",
    "lists": b'{"id": "r", "x": [' + b"[]," * 4_000_000 + b"0]}",
    "lines": b'{"id": "r", "x":\ndata:1,\n' + b"a\r" * 10_000 + b'data:"y": 1}',
}


@pytest.mark.parametrize("kind", CROWDED)
async def test_an_event_of_too_many_values_or_lines_ends_the_call_before_parsing(kind: str, receiver: OtlpReceiver) -> None:
    server = Server([STREAM_HEAD + EVENT, b"data: " + CROWDED[kind] + b"\n\n", EVENT])
    async with before(server, receiver, ANSWER_BYTES) as stand:
        status, body, _ = await asked(stand, stream=True)
        assert (status, body) == (200, b""), "it is not broken off"
        (span,) = await stand.calls()
        assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_oversized"
        assert span.attributes["gen_ai.response.id"] == "r" and (await stand.health())["counts"]["failed"] == 1


@pytest.fixture
async def turns() -> AsyncGenerator[list[int]]:
    """Count the iterations of the event loop during the test."""
    count = [0]

    async def turn() -> None:
        while True:
            count[0] += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(turn())
    yield count
    task.cancel()


async def test_many_small_events_do_not_block_other_calls(
    receiver: OtlpReceiver, turns: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: Counter[int] = Counter()

    def counted(event: bytes) -> Any:
        taken[turns[0]] += 1
        return payload_of(event)

    monkeypatch.setattr(answer, "payload_of", counted)
    async with before(Server([STREAM_HEAD + b"data: {}\n\n" * 6000 + EVENT]), receiver) as stand:
        status, body, _ = await asked(stand, stream=True)
        assert (status, body.count(b"data:")) == (200, 6001) and sum(taken.values()) >= 6001
        assert max(taken.values()) <= EVENTS_AT_ONCE


@pytest.mark.parametrize("kind", ["numbers", "lists"])
async def test_an_answer_of_too_many_values_is_refused_before_parsing(kind: str, receiver: OtlpReceiver) -> None:
    async with before(Server(sized(CROWDED[kind])), receiver, ANSWER_BYTES) as stand:
        status, body, _ = await asked(stand)
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (502, "upstream_oversized")
        assert "4000000 JSON objects and lists or 8388608 commas" in error["message"]
        (span,) = await stand.calls()
        assert span.error and span.attributes[conventions.LLM_INCOMPLETE] == "upstream_oversized"


async def test_very_many_token_ids_are_passed_on_and_not_recorded(receiver: OtlpReceiver) -> None:
    ids = json.dumps({"id": "r", "prompt_token_ids": [1], "choices": [{"index": 0, "delta": {}, "token_ids": [1] * (1 << 19)}]}).encode()
    async with before(Server([STREAM_HEAD, *[b"data: " + ids + b"\n\n"] * 5, EVENT]), receiver, ANSWER_BYTES) as stand:
        status, body, _ = await asked(stand, stream=True)
        assert status == 200 and body.endswith(EVENT)
        (span,) = await stand.calls()
        assert span.attributes[conventions.LLM_DEFECT] == "too_many_ids" and not span.error
        assert conventions.LLM_RESPONSE_TOKEN_IDS not in span.attributes and conventions.LLM_PROMPT_TOKEN_IDS not in span.attributes
        assert (await stand.health())["counts"]["too_many_ids"] == 1


async def test_an_event_may_have_some_thousand_lines(receiver: OtlpReceiver) -> None:
    event = b"\n".join(b"data: " + line for line in json.dumps({**REPLY, "x": [0] * 9000}, indent=0).encode().split(b"\n"))
    async with before(Server([STREAM_HEAD + event + b"\n\n"]), receiver) as stand:
        status, body, _ = await asked(stand, stream=True)
        assert (status, body) == (200, event + b"\n\n")
        (span,) = await stand.calls()
        assert not span.error and span.attributes["gen_ai.response.id"] == "r"


async def test_very_many_choices_are_not_as_many_spans(receiver: OtlpReceiver) -> None:
    server = Server(sized(json.dumps({**REPLY, "choices": [{**CHOICE, "index": number} for number in range(8000)]}).encode()))
    async with before(server, receiver) as stand:
        await asked(stand)
        spans = await stand.calls()
        assert 0 < len(spans) <= 1024
        assert all(span.error for span in spans)


async def test_headers_with_control_characters_stop_at_the_proxy(receiver: OtlpReceiver) -> None:
    server = Server(sized(json.dumps(REPLY).encode(), b"X-Fine: yes\r\nX-Odd: a\x01b\x7fc\r\nx-request-id: r1\r\n"))
    async with before(server, receiver) as stand:
        status, body, headers = await asked(stand)
        if status == 200:  # aiohttp may refuse such an answer by itself
            assert json.loads(body)["id"] == "r"
            assert headers["X-Fine"] == "yes" and "X-Odd" not in headers
        else:
            assert status == 502


BROKEN = {
    "no HTTP": b"-" * 200_000,
    "a header's name": b"HTTP/1.1 200 OK\r\nA\x00B: " + b"-" * 100_000 + b"\r\n\r\n",
    "a header's length": b"HTTP/1.1 200 OK\r\nA: " + b"-" * 200_000 + b"\r\n\r\n",
    "a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"-" * 200_000,
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_an_answer_that_is_no_http_is_a_short_error_without_the_key(kind: str, receiver: OtlpReceiver) -> None:
    """aiohttp's error contains the headers of the request, and the part of the answer that was read."""
    async with Server([BROKEN[kind]]).serving() as url:
        upstream = Upstream(url, api_key="zQ81hunter2", sampling={"extra_headers": {"x-mine": "zQ82hunter2"}})
        async with proxy(receiver, FixedUpstreams(upstream)) as stand:
            status, said, _ = await stand.post(f"{SCOPE}/v1/messages", {"model": "m", "messages": HELLO})
            assert (status, said["error"]["code"]) == (502, "upstream_error")
            assert "hunter2" not in str(said) and len(str(said)) < 2000 and url in str(said)
            (span,) = await stand.calls()
            assert span.error and "hunter2" not in str(span)


async def test_a_server_with_a_polite_answer_is_passed_on(receiver: OtlpReceiver) -> None:
    async with before(Server(sized(json.dumps(REPLY).encode())), receiver) as stand:
        status, body, _ = await asked(stand)
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "hi"
