"""Small POST requests are answered ahead of aiohttp, everything else by it, on one connection and in order."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import cast

import pytest
from aiohttp import web

from agl_otel.net import front
from agl_otel.net.front import AIOHTTPS, HTTP2_PREFACE, LARGEST_BYTES, Client, Front, SmallRequest, head, response
from agl_otel.net.http_server import FRONT, listen, make_runner
from tests.unit.net.test_http_server import PATIENCE_SECONDS, SHORT_SECONDS, connection, until_closed

STOP_SECONDS = 2.0


@dataclass
class Port:
    """A server whose front answers `front BODY`, and later where BODY begins with `later`; aiohttp answers `aiohttp BODY`."""

    runner: web.AppRunner
    number: int = 0
    taken: list[SmallRequest] = field(default_factory=list[SmallRequest])
    later: list[Client] = field(default_factory=list[Client])
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when aiohttp serves a request that is never answered."""

    def take(self, request: SmallRequest, client: Client) -> bool:
        if "x-not-here" in request.headers:
            return False
        self.taken.append(request)
        if request.body.startswith(b"later"):
            self.later.append(client)
        else:
            client.reply(response("200 OK", b"front " + request.body))
        return True


@contextlib.asynccontextmanager
async def serving(*, fronted: bool = True, idle_seconds: float = PATIENCE_SECONDS) -> AsyncGenerator[Port]:
    async def echo(request: web.Request) -> web.Response:
        body = await request.read()
        if body == b"hang":
            port.hanging.set()
            await asyncio.Event().wait()
        return web.Response(body=b"aiohttp " + body)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/in", echo)
    app.router.add_get("/in", echo)
    port = Port(make_runner(app, idle_seconds=idle_seconds, shutdown_timeout=STOP_SECONDS))
    if fronted:
        app[FRONT] = ("/in".__eq__, port.take, lambda: "no HTTP/2 here")
    await port.runner.setup()
    port.number = await listen(port.runner, "127.0.0.1", 0, None)
    try:
        yield port
    finally:
        await port.runner.cleanup()


def post(body: bytes, *headers: str, head: str = "POST /in HTTP/1.1\r\nHost: here") -> bytes:
    lines = (head, *headers, f"Content-Length: {len(body)}")
    return "\r\n".join((*lines, "", "")).encode("latin-1") + body


async def answers(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    """Read so many responses; return their bodies."""
    found: list[bytes] = []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(found) < count:
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"\r\ncontent-length: (\d+)\r\n", head, re.IGNORECASE)
            assert length is not None, head
            found.append(await reader.readexactly(int(length[1])))
    return found


@pytest.mark.parametrize("size", [1, 7, 1 << 20], ids=["byte by byte", "in pieces", "at once"])
async def test_a_client_of_http2_is_told_so_in_http1(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_PART_SECONDS", PATIENCE_SECONDS)
    settings_frame = b"\0\0\0\4\0\0\0\0\0"
    async with serving() as port, connection(port.number) as (reader, writer):
        sent = HTTP2_PREFACE + settings_frame
        for start in range(0, len(sent), size):
            writer.write(sent[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ") and b"\r\nConnection: close\r\n" in head
        assert await reader.readline() == b"no HTTP/2 here\n"
        assert port.taken == []
        assert await reader.read() == b""


@pytest.mark.parametrize("sent", [HTTP2_PREFACE[:-1] + b"x", b"PRI /in HTTP/1.1\r\nHost: here\r\n\r\n"], ids=["nearly", "a method"])
async def test_what_only_begins_like_http2_is_aiohttps(sent: bytes) -> None:
    async with serving() as port, connection(port.number) as (reader, writer):
        writer.write(sent)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"no HTTP/2 here" not in head + await reader.read(100)


@pytest.mark.parametrize("size", [7, 1 << 20], ids=["in pieces", "at once"])
async def test_requests_are_answered_in_order_however_they_come(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_PART_SECONDS", PATIENCE_SECONDS)
    sent = [f"{number}".encode() * number for number in range(1, 20)] + [b"", b"x" * (LARGEST_BYTES if size > 7 else 500)]
    data = b"".join(post(body, "User-Agent: a b", "accept:*/*", "Connection: keep-alive") for body in sent)
    async with serving() as port, connection(port.number) as (reader, writer):
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        expected = [b"front " + body for body in sent]
        assert await answers(reader, len(expected)) == expected
        assert port.taken[0].headers["user-agent"] == "a b" and port.taken[0].headers["accept"] == "*/*"


async def test_more_requests_than_are_held_at_once_leave_a_connection_that_goes_on() -> None:
    """The last response is written while reading is paused, with nothing left to take."""
    body = b"later" + b"x" * (LARGEST_BYTES - 5)
    async with serving() as port, connection(port.number) as (reader, writer):
        writer.write(post(body) * 3)
        for number in range(3):
            async with asyncio.timeout(PATIENCE_SECONDS):
                while len(port.later) <= number:  # noqa: ASYNC110 - the server has not read it yet
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.05 if number == 0 else 0)  # the others come meanwhile
            port.later[number].reply(response("200 OK", b"done"))
        assert await answers(reader, 3) == [b"done"] * 3
        writer.write(post(b"one more"))
        assert await answers(reader, 1) == [b"front one more"]


async def test_a_response_that_is_due_comes_before_the_next() -> None:
    async with serving() as port, connection(port.number) as (reader, writer):
        writer.write(post(b"later") + post(b"next") + post(b"last", "X-Not-Here: 1"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not port.later:  # noqa: ASYNC110 - the server has not read it yet
                await asyncio.sleep(0)
        assert len(port.taken) == 1
        port.later.pop().reply(response("200 OK", b"at last"))
        assert await answers(reader, 3) == [b"at last", b"front next", b"aiohttp last"]


async def test_a_request_that_comes_slowly_is_aiohttps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_PART_SECONDS", 0.0)
    async with serving(idle_seconds=SHORT_SECONDS) as port, connection(port.number) as (reader, writer):
        writer.write(post(b"slow")[:-1])
        await asyncio.sleep(SHORT_SECONDS / 2)
        writer.write(b"w" + post(b"next"))
        assert await answers(reader, 2) == [b"aiohttp slow", b"aiohttp next"]


@pytest.mark.parametrize("count", [1, 5])
async def test_a_connection_is_handed_over_once(count: int) -> None:
    """Behind requests that were answered at once, in one write."""
    async with serving() as port, connection(port.number) as (reader, writer):
        writer.write(post(b"x") * count + b"GET /in HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert (await reader.read()).count(b"HTTP/1.1 200 OK") == count + 1


async def test_who_ends_to_send_gets_the_responses_that_are_due() -> None:
    async with serving() as port, connection(port.number) as (reader, writer):
        writer.write(post(b"later") + post(b"next"))
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not port.later:  # noqa: ASYNC110 - the server has not read it yet
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)
            port.later.pop().reply(response("200 OK", b"at last"))
            answered = await reader.read()
        assert answered.count(b"HTTP/1.1 200 OK") == 2 and answered.endswith(b"front next")


async def test_a_connection_that_is_reset_leaves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as port:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", port.number)) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(post(b"x") + b"GET /in HTTP/1.1\r\nHost: here\r\n\r\n" + post(b"x" * 50_000)[:-1])
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert not caplog.records


ODD = {
    "another method": b"GET /in HTTP/1.1\r\nHost: here\r\n\r\n",
    "another path": post(b"x", head="POST /out HTTP/1.1\r\nHost: here"),
    "a query": post(b"x", head="POST /in?a=1 HTTP/1.1\r\nHost: here"),
    "HTTP/1.0": post(b"x", head="POST /in HTTP/1.0\r\nHost: here"),
    "no host": post(b"x", head="POST /in HTTP/1.1"),
    "two lengths": post(b"x", "Content-Length: 1"),
    "two lengths that differ": post(b"xy", "Content-Length: 1"),
    "a length with a sign": b"POST /in HTTP/1.1\r\nHost: here\r\nContent-Length: +1\r\n\r\nx",
    "a length of other digits": "POST /in HTTP/1.1\r\nHost: here\r\nContent-Length: \u00b2\r\n\r\nx".encode("latin-1"),
    "no length": b"POST /in HTTP/1.1\r\nHost: here\r\n\r\n",
    "chunks": b"POST /in HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n",
    "chunks and a length": post(b"1\r\nx\r\n0\r\n\r\n", "Transfer-Encoding: chunked"),
    "a long body": post(b"x" * (LARGEST_BYTES + 1)),
    "a folded header": post(b"x", "A: b\r\n c"),
    "a space before the colon": post(b"x", "A : b"),
    "no colon": post(b"x", "A"),
    "a bare newline": post(b"x", "A: b\nB: c"),
    "a zero byte": post(b"x", "A: b\0"),
    "a letter with an accent": post(b"x", "A: \xe9"),
    "a header twice": post(b"x", "A: b", "a: c"),
    "a page's origin": post(b"x", "Origin: http://here"),
    **{f"the header {name}": post(b"x", f"{name}: 1") for name in sorted(AIOHTTPS)},
    "close": post(b"x", "Connection: close"),
    "a name that is none": post(b"x", "A(b): c"),
    "two spaces": post(b"x", head="POST  /in HTTP/1.1\r\nHost: here"),
    "very many headers": post(b"x", *(f"A{number}: b" for number in range(200))),
    "no HTTP": b"\x16\x03\x01 hello\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "left to aiohttp": post(b"x", "X-Not-Here: 1"),
    "a head without end": b"POST /in HTTP/1.1\r\nA: " + b"a" * (1 << 17),
}


@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
async def test_what_is_odd_is_aiohttps_also_behind_a_request_that_is_not(odd: bytes) -> None:
    """The status is that of the same server without a front."""
    statuses: list[bytes] = []
    for fronted in (False, True):
        async with serving(fronted=fronted) as port, connection(port.number) as (reader, writer):
            writer.write(post(b"first") + (odd if fronted else b""))
            assert await answers(reader, 1) == [b"front first" if fronted else b"aiohttp first"]
            writer.write(b"" if fronted else odd)  # aiohttp alone would not answer the first: it judges what it has read as one
            async with asyncio.timeout(PATIENCE_SECONDS):
                statuses.append(await reader.readuntil(b"\r\n"))
            assert len(port.taken) == fronted
    assert statuses[0] == statuses[1]


@pytest.mark.parametrize(
    ("first", "drip"),
    [(b"", b""), (post(b"whole") + b"POST /in HT", b""), (b"POST /in HTTP/1.1\r\nX-Slow: ", b"a"), (post(b"x" * 100)[:-90], b"")],
    ids=["nothing", "half a line", "a byte now and then", "half a body"],
)
async def test_a_connection_without_a_whole_request_is_closed(first: bytes, drip: bytes) -> None:
    async with serving(idle_seconds=SHORT_SECONDS) as port, connection(port.number) as (reader, writer):
        writer.write(first)
        answered = await until_closed(reader, writer, drip)
        assert answered.count(b"HTTP/1.1") == first.count(b"whole")


async def test_who_waits_for_a_response_is_not_idle() -> None:
    async with serving(idle_seconds=SHORT_SECONDS) as port, connection(port.number) as (reader, writer):
        writer.write(post(b"later"))
        await asyncio.sleep(SHORT_SECONDS * 3)
        port.later.pop().reply(response("200 OK", b"at last"))
        assert await answers(reader, 1) == [b"at last"]


async def test_a_server_that_ends_answers_what_it_has_taken() -> None:
    async with serving() as port, connection(port.number) as (reader, writer), connection(port.number) as (idle, _):
        writer.write(post(b"later") + post(b"too late"))
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not port.later:  # noqa: ASYNC110 - the server has not read it yet
                await asyncio.sleep(0)
            ending = asyncio.create_task(port.runner.cleanup())
            assert await idle.read() == b""
            assert not ending.done()
            port.later.pop().reply(response("200 OK", b"at last"))
            assert (await reader.read()).endswith(b"at last")
            await ending
        assert len(port.taken) == 1


async def test_a_client_that_reads_nothing_is_not_served_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_PART_SECONDS", PATIENCE_SECONDS)
    monkeypatch.setattr(front, "_FLUSH_SECONDS", SHORT_SECONDS)
    many = post(b"x" * 1000) * 50_000
    async with serving(idle_seconds=3.0) as port, connection(port.number) as (reader, writer):
        writer.write(many)
        taken = -1
        while not port.taken or taken != len(port.taken):
            taken = len(port.taken)
            await asyncio.sleep(0.3)
        assert taken < 50_000, "its responses would fill the memory"
        async with asyncio.timeout(PATIENCE_SECONDS):
            while cast("Front", port.runner.server).connections:  # noqa: ASYNC110 - its end is not announced
                await asyncio.sleep(0.1)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await answers(reader, 50_000)


async def test_a_server_that_ends_does_not_wait_for_a_client_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_FLUSH_SECONDS", SHORT_SECONDS)
    async with serving() as port:
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", port.number))
            await loop.sock_sendall(client, post(b"later"))
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not port.later:  # noqa: ASYNC110 - the server has not read it yet
                    await asyncio.sleep(0.001)
            stopped = asyncio.create_task(port.runner.cleanup())
            await asyncio.sleep(0)
            port.later[0].reply(response("200 OK", b"x" * (8 << 20)))  # more than the system takes of it
            async with asyncio.timeout(PATIENCE_SECONDS / 2):  # which the server gives to requests without a response
                await stopped


async def test_a_response_in_parts_waits_for_a_client_that_does_not_read() -> None:
    part, parts = b"x" * (1 << 20), 20
    async with serving() as port, connection(port.number) as (reader, writer):
        client = await taken(port, writer)
        client.write(head("200 OK", [f"Content-Length: {len(part) * parts}"]))

        async def send() -> None:
            for _ in range(parts):
                client.write(part)
                await client.drained()
            client.reply(b"")

        sending = asyncio.create_task(send())
        done, _ = await asyncio.wait([sending], timeout=SHORT_SECONDS)
        assert not done and client.buffered() > 0
        assert await answers(reader, 1) == [part * parts]
        await sending
        writer.write(post(b"one more"))
        assert await answers(reader, 1) == [b"front one more"]


async def test_a_disconnected_client_is_noticed_where_someone_watches_it() -> None:
    async with serving() as port:
        async with connection(port.number) as (_, writer):
            client, gone = await taken(port, writer), asyncio.Event()
            client.gone = gone.set
            client.write(b"x" * (8 << 20))  # more than the system takes of it
            waiting = asyncio.create_task(client.drained())
            writer.close()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await gone.wait()
                with pytest.raises(ConnectionResetError):
                    await waiting
        assert client.is_closing()
        client.write(b"x")
        client.reply(b"x")
        with pytest.raises(ConnectionResetError):
            await client.drained()


async def test_a_response_that_is_broken_off_ends_after_what_was_written() -> None:
    async with serving() as port, connection(port.number) as (reader, writer):
        client, gone = await taken(port, writer), asyncio.Event()
        client.gone = gone.set
        client.write(head("200 OK", ["Transfer-Encoding: chunked"]) + b"1\r\nx\r\n")
        client.break_off()
        assert (await reader.read()).endswith(b"\r\n\r\n1\r\nx\r\n") and not gone.is_set()


async def taken(port: Port, writer: asyncio.StreamWriter) -> Client:
    """Send a request that is answered later, and return its client."""
    writer.write(post(b"later"))
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not port.later:  # noqa: ASYNC110 - the server has not read it yet
            await asyncio.sleep(0)
    return port.later.pop()


async def test_a_slow_reader_gets_the_rest_of_a_response_when_its_connection_is_idle() -> None:
    """It is read in parts, with pauses longer than the time after which an idle connection is closed."""
    whole = b"x" * (8 << 20)  # more than the system takes of it
    async with serving(idle_seconds=SHORT_SECONDS) as port, connection(port.number) as (reader, writer):
        client = await taken(port, writer)
        client.reply(response("200 OK", whole))
        await asyncio.sleep(SHORT_SECONDS * 4)
        assert (await reader.read()).endswith(whole)


async def test_a_stop_waits_once_for_what_hangs_here_and_at_aiohttp() -> None:
    async with serving() as port, connection(port.number) as (_, ahead), connection(port.number) as (_, behind):
        await taken(port, ahead)
        behind.write(post(b"hang", "X-Not-Here: 1"))
        await port.hanging.wait()
        began = asyncio.get_running_loop().time()
        await port.runner.cleanup()
        assert asyncio.get_running_loop().time() - began < 1.5 * STOP_SECONDS


async def test_connections_are_probed_for_hosts_that_vanish() -> None:
    async with serving() as port, connection(port.number) as (_, writer):
        client = cast("asyncio.Protocol", await taken(port, writer))
        transport = next(iter(cast("Front", port.runner.server).connections))._transport  # pyright: ignore[reportPrivateUsage]  # it has the socket
        assert client is not None and transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
