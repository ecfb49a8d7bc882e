"""Small POST requests are sent without aiohttp's session, as the session sends them; it sends all others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

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

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head + await reader.readexactly(4))
                writer.write(self.answer)
        writer.close()


@pytest.fixture
async def server() -> AsyncGenerator[Server]:
    served = Server()
    async with await asyncio.start_server(served.serve, "127.0.0.1", 0) as listening:
        served.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/a?b=%2F"
        yield served


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
        assert await answer.content.read() == b"ok"
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
