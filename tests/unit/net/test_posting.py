"""Small POST requests are sent without aiohttp's session, as the session sends them; it sends all others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping

import aiohttp
import pytest
from multidict import CIMultiDict

from agl_otel.net.posting import LARGEST_BYTES, post, release

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: Text/Plain; charset=utf-8\r\n\r\nok"


class Server:
    """Answers every request with `answer`; has the requests, and the number of connections."""

    def __init__(self) -> None:
        self.answer = OK
        self.requests: list[bytes] = []
        self.connections = 0
        self.url = ""
        self.piece = 1 << 20
        """Bytes of the answer that are written at once."""
        self.pause_seconds = 0.0
        """Between two pieces."""
        self.late = b""
        """Sent some time after the answer."""
        self.hangs_up = False
        self.serving: list[asyncio.Future[None]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.serving.append(asyncio.ensure_future(self._serve(reader, writer)))

    async def close(self) -> None:
        """Close all connections."""
        for task in self.serving:
            task.cancel()
        await asyncio.gather(*self.serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head + await reader.readexactly(4))
                for start in range(0, len(self.answer), max(self.piece, len(self.answer) // 1000)):
                    writer.write(self.answer[start : start + max(self.piece, len(self.answer) // 1000)])
                    await writer.drain()
                    await asyncio.sleep(self.pause_seconds)
                if self.late:
                    await asyncio.sleep(0.02)
                    writer.write(self.late)
                if self.hangs_up:
                    break


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    served = Server()
    async with await asyncio.start_server(served.serve, "127.0.0.1", 0) as listening:
        served.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/a?b=%2F"
        yield served
        await served.close()


@pytest.fixture
async def session() -> AsyncGenerator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None, sock_read=0.5)) as made:
        yield made


def given(**more: str) -> CIMultiDict[str]:
    return CIMultiDict({"accept-encoding": "identity", "content-type": "application/json", **more})


async def test_a_request_is_the_one_that_the_session_sends_and_its_connection_is_used_again(
    server: Server, session: aiohttp.ClientSession
) -> None:
    for _ in range(2):
        sent = await post(session, server.url, b"body", given(Cookie="a=b"))
        assert sent is not None
        answer, connection = sent
        assert (answer.status, answer.content_type, answer.content_length) == (200, "text/plain", 2)
        assert answer.body == b"ok"
        release(connection)
    async with session.post(server.url, data=b"body", headers=given(Cookie="a=b")) as response:
        await response.read()
    first, second, by_session = (sorted(request.lower().split(b"\r\n")) for request in server.requests)
    assert first == second == by_session
    assert server.connections == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda url: (url, b"body", given(Host="other")),
        lambda url: (url, b"body", given(**{"Content-Length": "1"})),
        lambda url: (url, b"body", given(a="b\r\nc: d")),
        lambda url: (url, b"body", given(a="b\0")),
        lambda url: (url, bytes(LARGEST_BYTES + 1), given()),
        lambda url: (url.replace("http://", "http://name:word@"), b"body", given()),
    ],
    ids=["host", "length", "line break", "zero byte", "large", "password"],
)
async def test_a_request_that_is_not_beyond_doubt_is_left_to_the_session(
    change: Callable[[str], tuple[str, bytes, CIMultiDict[str]]], server: Server, session: aiohttp.ClientSession
) -> None:
    assert await post(session, *change(server.url)) is None
    assert not server.connections


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"nonsense\r\n\r\n", aiohttp.ClientResponseError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n", aiohttp.ClientResponseError),
        (b"", TimeoutError),
    ],
    ids=["no HTTP", "two lengths", "silence"],
)
async def test_a_bad_answer_raises_the_errors_of_the_session(
    answer: bytes, error: type[Exception], server: Server, session: aiohttp.ClientSession
) -> None:
    server.answer = answer
    with pytest.raises(error) as of_post:
        await post(session, server.url, b"body", given())
    with pytest.raises(error) as of_session:
        await session.post(server.url, data=b"body", headers=given())
    assert (type(of_post.value), str(of_post.value)) == (type(of_session.value), str(of_session.value))


async def test_a_connection_with_an_unread_answer_is_not_used_again(server: Server, session: aiohttp.ClientSession) -> None:
    server.answer = OK.replace(b"Length: 2", b"Length: 200")
    sent = await post(session, server.url, b"body", given())
    assert sent is not None
    release(sent[1])
    server.answer = OK
    again = await post(session, server.url, b"body", given())
    assert again is not None
    release(again[1])
    assert server.connections == 2


async def test_an_interim_answer_is_skipped(server: Server, session: aiohttp.ClientSession) -> None:
    server.answer = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK
    sent = await post(session, server.url, b"body", given())
    assert sent is not None
    assert sent[0].status == 200
    release(sent[1])


RESPONSES = {
    "whole": OK,
    "empty": b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
    "no reason": OK.replace(b" OK", b""),
    "an error": OK.replace(b"200 OK", b"503 Later").replace(b"\r\n\r\n", b"\r\nRetry-After:  1 \t\r\n\r\n"),
    "a header twice": OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a\r\nset-cookie: b\r\n\r\n"),
    "bytes that are no ASCII": OK.replace(b"\r\n\r\n", "\r\nX: ä\r\n\r\n".encode()),
    "a long header": OK.replace(b"\r\n\r\n", b"\r\nX: " + b"x" * 8150 + b"\r\n\r\n"),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "in chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "the last": OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
    "a stream": OK.replace(b"Text/Plain", b"Text/Event-Stream"),
    "kept": OK.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\n\r\n"),
    "many headers": OK.replace(b"\r\n\r\n", b"\r\nX: y" * 110 + b"\r\n\r\n"),
    "long": OK.replace(b"Length: 2", b"Length: 300000")[:-2] + b"x" * 300_000,
    "long enough": OK.replace(b"Length: 2", b"Length: 200000")[:-2] + b"x" * 200_000,
}


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["in pieces", "at once"])
@pytest.mark.parametrize("name", RESPONSES)
async def test_every_response_is_read_as_the_session_reads_it(name: str, size: int, server: Server, session: aiohttp.ClientSession) -> None:
    server.answer, server.piece = RESPONSES[name], size
    read: list[tuple[int, list[tuple[str, str]], bytes | None]] = []
    for _ in range(2):
        sent = await post(session, server.url, b"body", given())
        assert sent is not None
        answer, connection = sent
        if size > 1:
            assert (answer.content is None) == (name in ("whole", "empty", "no reason", "an error", "a header twice", "long enough"))
        body = answer.body if answer.content is None else await answer.content.read()
        read.append((answer.status, plain(answer.headers), body))
        release(connection)
    async with session.post(server.url, data=b"body", headers=given()) as response:
        assert read == [(response.status, plain(response.headers), await response.read())] * 2
    assert server.connections == (3 if name == "the last" else 1)


def plain(headers: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name.lower(), value) for name, value in headers.items()]


@pytest.mark.parametrize("cut", [1, 20, len(OK) - 1], ids=["in the status line", "in the head", "in the body"])
async def test_a_response_that_breaks_off_raises_the_errors_of_the_session(
    cut: int, server: Server, session: aiohttp.ClientSession
) -> None:
    server.answer, server.hangs_up = OK[:cut], True
    errors: list[Exception] = []
    for sends in (sent_here, sent_by_session):
        with pytest.raises(aiohttp.ClientError) as error:
            await sends(session, server.url)
        errors.append(error.value)
    assert type(errors[0]) is type(errors[1]) and str(errors[0]) == str(errors[1])


async def sent_here(session: aiohttp.ClientSession, url: str) -> bytes:
    sent = await post(session, url, b"body", given())
    assert sent is not None and sent[0].content is not None
    try:
        return await sent[0].content.read()
    finally:
        release(sent[1])


async def sent_by_session(session: aiohttp.ClientSession, url: str) -> bytes:
    async with session.post(url, data=b"body", headers=given()) as response:
        return await response.read()


async def test_what_comes_after_a_response_is_not_the_next_one(server: Server, session: aiohttp.ClientSession) -> None:
    server.late = OK.replace(b"ok", b"no")
    for _ in range(2):
        sent = await post(session, server.url, b"body", given())
        assert sent is not None and sent[0].body == b"ok"
        release(sent[1])
        await asyncio.sleep(0.1)  # the late response comes
    assert server.connections == 2


async def test_the_time_of_the_first_byte_is_that_of_the_head(server: Server, session: aiohttp.ClientSession) -> None:
    server.piece, server.pause_seconds = len(OK) - 1, 0.1
    sent = await post(session, server.url, b"body", given())
    assert sent is not None and sent[0].body == b"ok"
    assert time.time_ns() - sent[0].began > 0.05e9
    release(sent[1])
