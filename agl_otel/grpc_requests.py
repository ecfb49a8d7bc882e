"""Requests of gRPC that are no such message: the client is told so (INVALID_ARGUMENT), and the log is not.

grpc.aio answers them with UNKNOWN and a traceback for each, as if the service had failed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError


class Registrar:
    """Stands for a server where generated code adds its handlers, and adds them with `tolerant` around each."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Nothing: the same handlers come by their names, below."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """The methods of a service."""
        made = {name: tolerant(handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, made),))


def tolerant(handler: Any) -> Any:
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
            if isinstance(request, DecodeError):
                await refuse(request, context)
            async for answer in stream(request, context):
                yield answer

        return grpc.unary_stream_rpc_method_handler(many, decoded, handler.response_serializer)
    unary: Callable[[Any, Any], Awaitable[Any]] = handler.unary_unary

    async def one(request: Any, context: Any) -> Any:
        if isinstance(request, DecodeError):
            await refuse(request, context)
        return await unary(request, context)

    return grpc.unary_unary_rpc_method_handler(one, decoded, handler.response_serializer)
