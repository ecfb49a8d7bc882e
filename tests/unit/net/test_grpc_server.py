"""A gRPC port restarts after a request terminated it, and refusals leave no garbage."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from agl_otel.errors import InUseError
from agl_otel.net.auth import QUEUE
from agl_otel.net.grpc_server import GrpcPort, TokenInterceptor, tolerant
from agl_otel.queue.proto import queue_pb2 as pb
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


def request_a_path_not_in_utf8(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(HTTP2 + grpc_head("/\udcff/x"))
        while connection.recv(4096):
            pass


async def call(port: int, method: str) -> bytes:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        return await channel.unary_unary(method, None, None)(b"x", wait_for_ready=True, timeout=300)


async def test_a_request_that_terminates_the_server_cuts_calls_and_it_restarts() -> None:
    held = asyncio.Event()
    echo = listener(held)
    port = await echo.start("127.0.0.1", 0)
    under_way = asyncio.create_task(call(port, "/echo/never"))
    await held.wait()
    for _ in range(2):
        await asyncio.to_thread(request_a_path_not_in_utf8, port)
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


BODY = 4 << 20
CALLS = 8


class Refusing(grpc.GenericRpcHandler):  # pyright: ignore[reportMissingTypeArgument] - generic in the stubs only
    """Accepts any bytes as a request, then aborts; `/refusing/many` as a stream."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def one(request: bytes, context: Any) -> None:
            try:
                raise InUseError(f"{len(request)} bytes")
            except InUseError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

        async def many(request: bytes, context: Any) -> AsyncIterator[bytes]:
            yield b""
            await one(request, context)

        if handler_call_details.method == "/refusing/bytes":
            return tolerant(grpc.unary_unary_rpc_method_handler(one, pb.EnqueueRequest.FromString))
        if handler_call_details.method == "/refusing/many":
            return tolerant(grpc.unary_stream_rpc_method_handler(many, bytes))
        return tolerant(grpc.unary_unary_rpc_method_handler(one, bytes))


@pytest.mark.parametrize(
    ("method", "token", "status"),
    [
        ("/refusing/one", "", "INVALID_ARGUMENT"),
        ("/refusing/many", "", "INVALID_ARGUMENT"),
        ("/refusing/bytes", "", "INVALID_ARGUMENT"),
        ("/refusing/one", "the-token", "UNAUTHENTICATED"),
    ],
)
async def test_a_refused_call_leaves_no_request_to_the_garbage_collector(method: str, token: str, status: str) -> None:
    def make() -> grpc.aio.Server:
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 2 * BODY)]
        server = grpc.aio.server(interceptors=TokenInterceptor.at(QUEUE, token), options=options)
        server.add_generic_rpc_handlers((Refusing(),))
        return server

    port = GrpcPort(make, "AGL_SOME_PORT")
    number = await port.start("127.0.0.1", 0)
    body = b"\0" * BODY
    gc.disable()
    tracemalloc.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{number}") as channel:
            call = channel.unary_stream(method, None, None)
            before = tracemalloc.get_traced_memory()[0]
            for _ in range(CALLS):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async for _ in call(body, timeout=300):
                        pass
                assert refused.value.code().name == status
                refused.value.__traceback__ = None
            held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
        gc.enable()
        await port.stop(0)
    assert held < 2 * BODY, f"{held >> 20} MiB of {CALLS} refused calls are held"
