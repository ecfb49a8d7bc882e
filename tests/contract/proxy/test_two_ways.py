"""A call that is taken ahead of aiohttp (net/front.py) has the answer, the record and the errors of one that is not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web

from agl_otel.net.auth import attempt_key
from agl_otel.proxy.app import Proxy
from agl_otel.proxy.upstream import FixedUpstreams, Route, Upstream
from agl_otel_hook.context import Key
from tests.contract.proxy.stand import HELLO, SCOPE, Stand, proxy
from tests.model_server import ModelServer
from tests.otlp_receiver import OtlpReceiver

BEHIND = "TE: trailers"
"""A header of requests that are left to aiohttp."""
OWN = ("Date", "Server")
"""Headers that may differ."""
PATH = f"{SCOPE}/v1/chat/completions"
CALL: dict[str, Any] = {"model": "m", "messages": HELLO}
CALLS: dict[str, Any] = {
    "whole": CALL,
    "several": {**CALL, "n": 3},
    "long": {**CALL, "messages": [{"role": "user", "content": "word " * 9_000}], "return_token_ids": True},
    "stream": {**CALL, "stream": True},
    "text": "no JSON",
    "list": [],
}


SENT: list[bool] = []
"""For each request, whether it is to be taken ahead."""


@pytest.fixture(autouse=True)
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make sure that each request takes its way."""
    SENT.clear()
    taken: list[bool] = []
    take = Proxy._take  # pyright: ignore[reportPrivateUsage]  # only it knows

    def watched(*given: Any) -> bool:
        taken.append(take(*given))
        return taken[-1]

    monkeypatch.setattr(Proxy, "_take", watched)
    yield
    assert len(taken) == SENT.count(True) > 0 and True in taken and False in SENT


async def exchange(stand: Stand, body: bytes, *headers: str, path: str = PATH) -> tuple[str, dict[str, str], bytes]:
    """Send a request by hand; return the status line, the headers and the bytes of the body as they came."""
    SENT.append(BEHIND not in headers)
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(stand.url).port)
    lines = (f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}", *headers, "", "")
    writer.write("\r\n".join(lines).encode() + body)
    status, *given = (await reader.readuntil(b"\r\n\r\n")).decode()[:-4].split("\r\n")
    found = dict(line.split(": ", 1) for line in given)
    assert len(found) == len(given), "a header came twice"
    if found.get("Transfer-Encoding") == "chunked":
        data = bytearray()
        while (size := int(await reader.readline(), 16)) > 0:
            data += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        answer = bytes(data)
        assert await reader.readexactly(2) == b"\r\n"
    else:
        answer = await reader.readexactly(int(found["Content-Length"]))
    writer.close()
    await writer.wait_closed()
    return status, {name.lower(): value for name, value in found.items() if name not in OWN}, answer


@pytest.mark.parametrize("name", CALLS)
async def test_both_ways_answer_and_forward_alike(stand: Stand, model: ModelServer, name: str) -> None:
    body = json.dumps(CALLS[name]).encode()
    ahead, behind = await exchange(stand, body), await exchange(stand, body, BEHIND)
    assert ahead == behind
    assert len(model.requests) in (0, 2)
    for first, second in zip(model.requests[::2], model.requests[1::2], strict=True):
        assert first == second
    for first, second in zip(model.headers[::2], model.headers[1::2], strict=True):
        assert {*first.items()} - {*varying(first)} == {*second.items()} - {*varying(second)}


def varying(headers: Any) -> list[tuple[str, str]]:
    """The headers that differ from call to call."""
    return [(name, value) for name, value in headers.items() if name == "traceparent"]


async def test_both_ways_refuse_alike(receiver: OtlpReceiver, model: ModelServer) -> None:
    key = attempt_key("secret", "ro-1", "at-1")
    async with proxy(receiver, FixedUpstreams(Upstream(model.url)), token="secret") as stand:
        for given, status in ((key, 200), ("secret", 200), (attempt_key("secret", "ro-1", "at-2"), 401), ("", 401)):
            headers = [f"Authorization: Bearer {given}"] if given else []
            ahead = await exchange(stand, json.dumps(CALL).encode(), *headers)
            assert ahead == await exchange(stand, json.dumps(CALL).encode(), *headers, BEHIND)
            assert ahead[0].startswith(f"HTTP/1.1 {status} ")


async def test_both_ways_pass_a_failure_on_alike(stand: Stand, model: ModelServer) -> None:
    model.status = 429
    ahead = await exchange(stand, json.dumps(CALL).encode())
    assert ahead == await exchange(stand, json.dumps(CALL).encode(), BEHIND) and ahead[0].startswith("HTTP/1.1 429 ")
    await model.stop()
    ahead = await exchange(stand, json.dumps(CALL).encode())
    assert ahead == await exchange(stand, json.dumps(CALL).encode(), BEHIND) and ahead[0].startswith("HTTP/1.1 502 ")


async def test_both_ways_answer_a_crash_alike(receiver: OtlpReceiver) -> None:
    class Broken(FixedUpstreams):
        async def resolve(self, key: Key | None, asked: str | None, conversation: str | None = None) -> Route:
            raise ValueError("a mistake")

    async with proxy(receiver, Broken()) as stand:
        ahead = await exchange(stand, json.dumps(CALL).encode())
        assert ahead == await exchange(stand, json.dumps(CALL).encode(), BEHIND)
        assert ahead[0].startswith("HTTP/1.1 500 ") and json.loads(ahead[2])["error"]["code"] == "crashed"


async def test_a_closed_attempt_is_over_on_both_ways_and_for_its_token_counts(stand: Stand, model: ModelServer) -> None:
    await stand.close()
    for path in (PATH, f"{SCOPE}/v1/messages/count_tokens"):
        ahead = await exchange(stand, json.dumps(CALL).encode(), *(() if path == PATH else (BEHIND,)), path=path)
        assert ahead == await exchange(stand, json.dumps(CALL).encode(), BEHIND, path=path) and ahead[0].startswith("HTTP/1.1 410 ")
    assert model.requests == []


async def test_both_ways_are_counted_alike(stand: Stand) -> None:
    for headers in ((), (BEHIND,)):
        await exchange(stand, json.dumps(CALL).encode(), *headers)
        await exchange(stand, b"[]", *headers)
    async with aiohttp.ClientSession() as session, session.get(f"{stand.url}/metrics") as answer:
        lines = [line for line in (await answer.text()).splitlines() if line.startswith("agl_http_total{") and "chat/completions" in line]
    assert sorted(line.rpartition("status=")[2] for line in lines) == ['"200"} 2.0', '"400"} 2.0']


async def test_an_answer_whose_type_only_looks_like_another_is_passed_on(receiver: OtlpReceiver) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=b"data: [DONE]\n\n", headers={"Content-Type": "Text/Event-Stream"})

    server = ModelServer({"/odd/chat/completions": answer})
    await server.start()
    async with proxy(receiver, FixedUpstreams(Upstream(server.url.removesuffix("/v1") + "/odd"))) as stand:
        ahead = await exchange(stand, json.dumps(CALL).encode())
        assert ahead == await exchange(stand, json.dumps(CALL).encode(), BEHIND)
        assert ahead[0] == "HTTP/1.1 200 OK" and ahead[2] == b"data: [DONE]\n\n"
    await server.stop()
