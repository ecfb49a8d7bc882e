"""A gRPC port that a request has ended listens again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import grpc
import grpc.aio
import pytest

from agl_otel.errors import InUseError
from agl_otel.net.grpc_server import GrpcPort
from tests.chaos.clients import HTTP2, frame, grpc_head


class Echo(grpc.GenericRpcHandler):  # pyright: ignore[reportMissingTypeArgument] - generic in the stubs only
    """`/echo/now` answers at once, any other method never."""

    def __init__(self, held: asyncio.Event) -> None:
        self._held = held

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def answer(request: bytes, _: object) -> bytes:
            if handler_call_details.method != "/echo/now":
                self._held.set()
                await asyncio.Event().wait()
            return request

        return grpc.unary_unary_rpc_method_handler(answer)


def listener(held: asyncio.Event) -> GrpcPort:
    def make() -> grpc.aio.Server:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((Echo(held),))
        return server

    return GrpcPort(make, "AGL_SOME_PORT")


def ask_for_a_path_that_is_no_utf_8(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(HTTP2 + grpc_head("/\udcff/x"))
        while connection.recv(4096):
            pass


async def call(port: int, method: str) -> bytes:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        return await channel.unary_unary(method, None, None)(b"x", wait_for_ready=True, timeout=300)


async def test_a_request_that_ends_the_server_cuts_what_is_under_way_and_another_one_listens() -> None:
    held = asyncio.Event()
    echo = listener(held)
    port = await echo.start("127.0.0.1", 0)
    under_way = asyncio.create_task(call(port, "/echo/never"))
    await held.wait()
    for _ in range(2):
        await asyncio.to_thread(ask_for_a_path_that_is_no_utf_8, port)
        assert await call(port, "/echo/now") == b"x"
    with pytest.raises(grpc.aio.AioRpcError) as cut:
        await under_way
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    await echo.stop(0)


async def test_a_header_whose_name_is_no_utf_8_leaves_no_traceback_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    echo = listener(asyncio.Event())
    port = await echo.start("127.0.0.1", 0)
    asked = HTTP2 + grpc_head("/echo/now").replace(b"content-type", b"content-typ\xe1") + frame(0, 1, 1, b"\0\0\0\0\1x")

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
            connection.sendall(asked)
            answer = b""
            while b"grpc-status" not in answer and (piece := connection.recv(4096)):
                answer += piece
            return answer

    assert b"grpc-status" in await asyncio.to_thread(ask)
    assert await call(port, "/echo/now") == b"x"
    await echo.stop(0)
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_port_that_is_taken_is_named_with_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = other.getsockname()[1]
        with pytest.raises(InUseError, match=rf"127.0.0.1:{number} \(Address already in use\): .* AGL_SOME_PORT"):
            await listener(asyncio.Event()).start("127.0.0.1", number)
