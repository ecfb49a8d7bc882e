"""Requests of gRPC that are no such message: the client is told so (INVALID_ARGUMENT), and the log is not.

grpc.aio answers them with UNKNOWN and a traceback for each, as if the service had failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from time import perf_counter
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

Observe = Callable[[str, str, float], None]
"""Told of each call that has ended: its method, its status (OK, NOT_FOUND …) and the seconds that it took."""


class Registrar:
    """Stands for a server where generated code adds its handlers, and adds them with `tolerant` around each."""

    def __init__(self, server: grpc.aio.Server, observe: Observe = lambda *_: None) -> None:
        self._server = server
        self._observe = observe

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Nothing: the same handlers come by their names, below."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """The methods of a service."""
        made = {name: tolerant(handler, name, self._observe) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, made),))


def tolerant(handler: Any, name: str = "", observe: Observe = lambda *_: None) -> Any:
    """A handler of a call with one request, which answers INVALID_ARGUMENT where the request cannot be decoded."""
    decode: Callable[[bytes], Any] = handler.request_deserializer

    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return error

    async def refuse(error: DecodeError, context: Any) -> None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"these bytes are no such request: {error}")

    if handler.response_streaming:
        stream: Callable[[Any, Any], AsyncIterator[Any]] = handler.unary_stream

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            with _observed(name, context, observe):
                if isinstance(request, DecodeError):
                    await refuse(request, context)
                async for answer in stream(request, context):
                    yield answer

        return grpc.unary_stream_rpc_method_handler(many, decoded, handler.response_serializer)
    unary: Callable[[Any, Any], Awaitable[Any]] = handler.unary_unary

    async def one(request: Any, context: Any) -> Any:
        with _observed(name, context, observe):
            if isinstance(request, DecodeError):
                await refuse(request, context)
            return await unary(request, context)

    return grpc.unary_unary_rpc_method_handler(one, decoded, handler.response_serializer)


class _observed:  # noqa: N801 - a context manager; a generator would cost each call three times as much
    def __init__(self, name: str, context: Any, observe: Observe) -> None:
        self._name, self._context, self._observe = name, context, observe

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        status = "OK"
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            status = "CANCELLED"
        elif error is not None:
            code = self._context.code()
            status = code.name if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK else "UNKNOWN"
        self._observe(self._name, status, perf_counter() - self._began)
