"""An agent that was taken ahead of aiohttp: what is written to its connection, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from multidict import CIMultiDict

from agl_otel.net.front import SmallRequest
from agl_otel.proxy.agent import FrontAgent
from agl_otel.proxy.answer import error_response


@dataclass
class Connection:
    """Keeps what is written."""

    closing: bool = False
    gone: Callable[[], object] | None = None
    written: bytearray = field(default_factory=bytearray)

    def reply(self, answer: bytes) -> None:
        self.written += answer

    def write(self, part: bytes) -> None:
        self.written += part

    def is_closing(self) -> bool:
        return self.closing

    def buffered(self) -> int:
        return 0

    async def drained(self) -> None:
        pass

    def break_off(self) -> None:
        self.closing = True

    abort = break_off


def agent_of(connection: Connection) -> FrontAgent:
    return FrontAgent(SmallRequest("/", {}, b""), CIMultiDict(), connection)


async def test_an_answer_for_which_nobody_waits_is_not_given() -> None:
    agent = agent_of(Connection(closing=True))
    with pytest.raises(ConnectionResetError):
        await agent.answer(200, CIMultiDict(), b"x")
    with pytest.raises(ConnectionResetError):
        await agent.end()


@pytest.mark.parametrize("closing", [False, True])
async def test_a_refusal_is_sent_if_somebody_waits_for_it(closing: bool) -> None:
    connection = Connection(closing=closing)
    assert await agent_of(connection).finish(error_response(503, "later", "busy")) == ("0" if closing else "503")
    assert connection.written.startswith(b"HTTP/1.1 503 ") is not closing


async def test_an_answer_that_was_begun_is_broken_off_by_a_refusal() -> None:
    connection = Connection()
    agent = agent_of(connection)
    await agent.begin(200, CIMultiDict())
    assert await agent.finish(error_response(503, "later", "busy")) == "200" and connection.closing


async def test_a_stream_is_sent_in_chunks_and_an_empty_part_does_not_end_it() -> None:
    connection = Connection()
    agent = agent_of(connection)
    await agent.begin(200, CIMultiDict({"Content-Type": "text/event-stream"}))
    for part in (b"data: 1\n\n", b"", b"x" * 16):
        await agent.write(part)
    await agent.end()
    head, _, body = bytes(connection.written).partition(b"\r\n\r\n")
    assert b"\r\nTransfer-Encoding: chunked\r\n" in head and b"Content-Length" not in head
    assert body == b"9\r\ndata: 1\n\n\r\n10\r\nxxxxxxxxxxxxxxxx\r\n0\r\n\r\n"


@pytest.mark.parametrize("status", [204, 304])
async def test_an_answer_that_has_no_body_gets_none(status: int) -> None:
    connection = Connection()
    agent = agent_of(connection)
    await agent.answer(status, CIMultiDict(), b"x")
    assert connection.written.endswith(b"\r\n\r\n") and b"Content-Length" not in connection.written


async def test_the_servers_own_headers_are_not_sent_twice() -> None:
    connection = Connection()
    latin = b"\xe9".decode(errors="surrogateescape")
    headers = CIMultiDict({"Date": "then", "content-type": "a/b", "Cross-Origin-Resource-Policy": "cross-origin", "x": latin})
    await agent_of(connection).answer(299, headers, b"x")
    first, *lines = bytes(connection.written).partition(b"\r\n\r\n")[0].split(b"\r\n")
    assert first == b"HTTP/1.1 299 " and b"x: \xe9" in lines
    names = sorted(line.partition(b":")[0].lower() for line in lines)
    assert names == [b"content-length", b"content-type", b"cross-origin-resource-policy", b"date", b"x"]
