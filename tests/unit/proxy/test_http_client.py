"""The client to model servers, against a server that writes what the test says, byte for byte."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
from collections.abc import AsyncGenerator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_otel.proxy.http_answer import Answer, BrokenOffError, Connection
from agl_otel.proxy.http_client import ConnectTimeoutError, HttpClient, target_of

Write = Callable[[bytes], None]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"
WHOLE = {
    "a length": (OK, b"hi"),
    "no body": (b"HTTP/1.1 204 No Content\r\nX: y\r\n\r\n", b""),
    "an answer before the answer": (b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK, b"hi"),
    "chunks": (
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3;a=b\r\nab\n\r\n0A\r\n0123456789\r\n0\r\nt: u\r\n\r\n",
        b"ab\n0123456789",
    ),
    "compressed": (b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n%s", b"zip"),
}
BROKEN = {
    "no HTTP": b"SSH-2.0-OpenSSH\r\n\r\n",
    "no status": b"HTTP/1.1 2x0 OK\r\n\r\n",
    "no header": b"HTTP/1.1 200 OK\r\nabc\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1, 2\r\n\r\n",
    "no chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    "a negative chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
    "a chunk that is too long": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc\r\n",
    "an encoding nobody asked for": b"HTTP/1.1 200 OK\r\ncontent-encoding: br\r\ncontent-length: 1\r\n\r\nx",
    "what is not compressed": b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc",
    "a head without end": b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 30_000,
    "an end in the middle": b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
    "an end before the last chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n",
    "nothing": b"",
}


class Server:
    """Answers each request with the next of `answers`; `requests` holds what came, `connections` how many there were."""

    def __init__(self, *answers: bytes | Callable[[], bytes]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.url = ""
        self.gone = asyncio.Event()
        self.reads = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.gone.clear()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.reads:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")), 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                writer.write(answer if isinstance(answer, bytes) else answer())
                if not self.answers:
                    break
            await writer.drain()
            if self.reads:
                writer.write_eof()
            await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        self.open -= 1
        if not self.open:
            self.gone.set()


@contextlib.asynccontextmanager
async def served(server: Server, *, silence_seconds: float = 60.0) -> AsyncGenerator[HttpClient]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    client = HttpClient(connect_seconds=30.0, silence_seconds=silence_seconds, keep_alive_seconds=60.0)
    try:
        yield client
    finally:
        await client.close()
        await server.gone.wait()
        listening.close()


async def test_connections_are_kept_and_shared() -> None:
    server = Server(OK, OK, OK)
    async with served(server) as client:
        for method, body in (("GET", b""), ("POST", b"{}"), ("POST", b"")):
            async with client.request(method, f"{server.url}/a?b=c", headers=[("x", "é")], body=body) as answer:
                assert (answer.status, await answer.read()) == (200, b"hi")
    assert server.connections == 1
    get, post, empty = server.requests
    assert get.startswith(b"GET /v1/a?b=c HTTP/1.1\r\nhost: 127.0.0.1:") and "x: é".encode() in get and b"content-length" not in get
    assert post.endswith(b"content-length: 2\r\n\r\n{}") and empty.endswith(b"content-length: 0\r\n\r\n")


async def test_an_answer_that_is_not_read_to_its_end_costs_the_connection() -> None:
    server = Server(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc")
    async with served(server) as client:
        async with client.request("GET", server.url, headers=[]) as answer:
            assert await answer.readany() == b"abc"
        await server.gone.wait()


@pytest.mark.parametrize("head", [b"connection: close\r\ncontent-length: 2\r\n\r\nhi", b"\r\nhi"])
async def test_a_connection_that_ends_with_the_answer_is_not_used_again(head: bytes) -> None:
    for last in (b"HTTP/1.1 200 OK\r\n" + head, b"HTTP/1.0 200 OK\r\n" + head):
        server = Server(last)
        async with served(server) as client, client.request("GET", server.url, headers=[]) as answer:
            assert await answer.read() == b"hi"


class Feed:
    """A transport's side of a Connection, which is fed by hand."""

    def __init__(self) -> None:
        self.connection = Connection(set())
        self.answer = self.connection.begin(60.0)

    async def take(self, data: bytes, cuts: list[int]) -> Answer:
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            self.connection.data_received(data[start:end])
        return self.answer


@given(st.data())
def test_answers_are_read_in_whatever_pieces_they_come(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(WHOLE)))
    sent, body = WHOLE[name]
    packed = gzip.compress(body)
    sent = sent % (len(packed), packed) if name == "compressed" else sent
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))

    async def read() -> bytes:
        return await (await Feed().take(sent, cuts)).read()

    assert asyncio.run(read()) == body


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
async def test_what_is_no_answer_is_an_error(sent: bytes) -> None:
    server = Server(sent)
    async with served(server) as client:
        with pytest.raises(BrokenOffError):
            async with client.request("POST", server.url, headers=[], body=b"{}") as answer:
                await answer.read()


async def test_what_came_before_the_end_can_be_read() -> None:
    server = Server(BROKEN["an end before the last chunk"])
    async with served(server) as client, client.request("GET", server.url, headers=[]) as answer:
        assert await answer.readany() == b"a"
        with pytest.raises(BrokenOffError):
            await answer.readany()


@pytest.mark.parametrize("size", [2, 64 << 20], ids=["asked", "while it is asked"])
async def test_a_server_that_says_nothing_is_given_up(size: int) -> None:
    server = Server(OK)
    server.reads = False
    async with served(server, silence_seconds=0.05) as client:
        with pytest.raises(TimeoutError):
            async with client.request("POST", server.url, headers=[], body=bytes(size)):
                pass


async def test_a_large_body_goes_in_pieces_and_arrives_whole() -> None:
    body = bytes(range(256)) * (8 << 10)
    server = Server(OK)
    async with served(server) as client, client.request("POST", server.url, headers=[], body=body) as answer:
        assert await answer.read() == b"hi"
    assert server.requests[0].endswith(body)


async def test_a_fast_server_waits_for_a_slow_reader() -> None:
    large = bytes(8 << 20)
    server = Server(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(large) + large)
    async with served(server) as client, client.request("GET", server.url, headers=[]) as answer:
        pieces: list[bytes] = []
        while piece := await answer.readany():
            pieces.append(piece)
            assert len(piece) < 2 << 20
            await asyncio.sleep(0)
        assert b"".join(pieces) == large


async def test_redirects_that_keep_the_method_are_followed_and_keys_stay_at_home() -> None:
    other = Server(OK)
    async with served(other):
        server = Server(
            b"HTTP/1.1 307 Moved\r\nlocation: /v2/x\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 308 Moved\r\nlocation: %s\r\ncontent-length: 0\r\n\r\n" % other.url.encode(),
        )
        async with (
            served(server) as client,
            client.request("POST", server.url, headers=[("Authorization", "k"), ("a", "b")], body=b"{}") as answer,
        ):
            assert await answer.read() == b"hi"
        await client.close()
    assert server.requests[1].startswith(b"POST /v2/x ") and b"Authorization: k" in server.requests[1]
    assert b"Authorization" not in other.requests[0] and b"a: b" in other.requests[0] and other.requests[0].endswith(b"{}")


async def test_redirects_have_an_end() -> None:
    server = Server(*[b"HTTP/1.1 307 Moved\r\nlocation: /\r\ncontent-length: 0\r\n\r\n"] * 9)
    async with served(server) as client:
        with pytest.raises(BrokenOffError, match="redirects"):
            async with client.request("GET", server.url, headers=[]):
                pass


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\r", "a\r\n\r\n"])
async def test_a_header_cannot_become_two(value: str) -> None:
    server = Server(OK)
    async with served(server) as client:
        with pytest.raises(ValueError, match="line break"):
            async with client.request("GET", server.url, headers=[("x", value)]):
                pass
    assert not server.requests


async def test_a_server_that_cannot_be_reached_in_time_was_asked_nothing() -> None:
    client = HttpClient(connect_seconds=0.0, silence_seconds=1.0, keep_alive_seconds=1.0)
    with pytest.raises(ConnectTimeoutError):
        async with client.request("GET", "http://127.0.0.1:9/", headers=[]):
            pass
    await client.close()


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://a b/", "http://x:y/", "http://x/\r\nhost: y"])
def test_what_is_no_address_is_said(url: str) -> None:
    with pytest.raises(BrokenOffError, match="address"):
        target_of(url)


def test_a_password_in_the_address_is_sent() -> None:
    target = target_of("https://us%40er:pw@host/v1")
    assert (target.server, target.path) == (("https", "host", 443), "/v1")
    assert target.head == "host: host\r\nauthorization: Basic dXNAZXI6cHc=\r\n"
