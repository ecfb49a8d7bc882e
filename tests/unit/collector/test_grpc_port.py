"""The server closes useless connections; clients in use see no error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest

from agl_otel.collector.grpc_port import METHODS, grpc_options

HANG_SECONDS = 120.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, PING, GOAWAY = 4, 1, 6, 7


async def answer(raw: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
    return raw


@pytest.fixture
async def port(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """Port of a server whose connections last 0.6 s; calls in progress then have the parameter's seconds, 0.3 by default."""
    grace = getattr(request, "param", 0.3)
    server = grpc.aio.server(options=grpc_options(1 << 20, idle_seconds=0.3, age_seconds=0.6, grace_seconds=grace))
    service, method = METHODS[0].strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield number
    await server.stop(None)


def frame(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    """Build an HTTP/2 frame (RFC 9113, section 4.1)."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def text(value: bytes) -> bytes:
    return bytes([len(value)]) + value


def export_headers() -> bytes:
    """Build the headers of a POST to the first method, as literals without an index (RFC 7541, section 6.2.2); no body follows."""
    pairs = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", METHODS[0].encode()), (b":authority", b"collector"))
    pairs += ((b"content-type", b"application/grpc"), (b"te", b"trailers"))
    return b"".join(b"\x00" + text(name) + text(value) for name, value in pairs)


@pytest.mark.parametrize(("limit", "expected"), [(1 << 20, 5 << 18), (1 << 31, (1 << 31) - 1)])
def test_messages_remain_bounded_beyond_the_limit(limit: int, expected: int) -> None:
    assert dict(grpc_options(limit))["grpc.max_receive_message_length"] == expected


@pytest.mark.parametrize("request_begun", [b"", frame(HEADERS, export_headers(), flags=4, stream=1)], ids=["idle", "stalled"])
async def test_a_useless_connection_is_closed(port: int, request_begun: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS) + request_begun)
    kinds: list[int] = []
    async with asyncio.timeout(HANG_SECONDS):
        while head := await reader.read(9):
            head += await reader.readexactly(9 - len(head))
            kinds.append(head[3])
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            if head[3] == PING and not head[4]:  # answer like a live client; otherwise the server closes the connection
                writer.write(frame(PING, payload, flags=1))
    assert GOAWAY in kinds
    writer.close()


@pytest.mark.parametrize("port", [HANG_SECONDS], indirect=True)  # on a loaded machine the response to a call may take longer than usual
async def test_a_client_that_works_sees_no_error(port: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(METHODS[0], request_serializer=None, response_deserializer=None)
        for number in range(8):  # beyond both time limits of the fixture
            assert await call(b"%d" % number) == b"%d" % number
            await asyncio.sleep(0.2)
