"""Serve gRPC to untrusted clients.

- `GrpcPort` restarts a failed server: grpcio 1.85 terminates the whole server at a request whose path is not UTF-8, which any client can
  send. Calls in flight are cut, as in a restart of the service, and clients retry them.
- `TokenInterceptor` authenticates calls by auth.py; the request of a refused call is never read (`refusing`).
- `Aborted` releases the requests of aborted calls.
- `Registrar` and `tolerant` answer INVALID_ARGUMENT to undecodable requests: grpc.aio answers UNKNOWN and logs a traceback for each, as if
  the service had failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from time import perf_counter
from typing import Any, Final

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from agl_otel.errors import InUseError, UsageError
from agl_otel.net.auth import OWN_NEEDED, PortAccess, authorization_of, is_token_itself
from agl_otel.net.tls import Tls
from agl_otel.service.logs import ErrorFilter
from agl_otel.service.ports import check_free

LOOK_SECONDS: Final = 0.25
"""How long a terminated server may go unnoticed."""
Observe = Callable[[str, str, float], None]
"""Called after each call with its method, status (OK, NOT_FOUND …) and duration in seconds."""
Check = Callable[[str, Any], object]
"""Called before each call with its method and request. Raises UsageError to refuse it."""
_log = logging.getLogger(__name__)
_CLIENT_ERRORS: Final = ErrorFilter(UnicodeDecodeError)
"""Suppress tracebacks for header names that are not UTF-8, which grpcio then reads as Latin-1."""
_GRPCIO: Final = logging.getLogger("grpc._cython.cygrpc")


class GrpcPort:
    """A gRPC port that restarts its server if a request terminates it. Use `start`, then `stop`.

    Args:
        make: creates a server with its handlers, which does not listen yet.
        setting: the variable that names the port, for errors.
    """

    def __init__(self, make: Callable[[], grpc.aio.Server], setting: str) -> None:
        self._make = make
        self._setting = setting
        self._server: grpc.aio.Server | None = None
        self._restarting: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int, tls: Tls | None = None) -> int:
        """Listen on host:port (0: a free port), with `tls` if given; return the port. Raises InUseError if it is taken."""
        _GRPCIO.addFilter(_CLIENT_ERRORS)
        if port:
            check_free(host, port, self._setting)  # gRPC's own error does not name the reason
        try:
            self._server, port = await self._listening(host, port, tls)
        except RuntimeError as error:
            raise InUseError.of_port(host, port, str(error), self._setting) from None
        self._restarting = asyncio.create_task(self._restart_when_ended(self._server, host, port, tls), name="grpc-port")
        return port

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, and let those in flight finish for `grace_seconds`."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait({self._restarting})
        if self._server is not None:
            await self._server.stop(grace_seconds)

    async def _listening(self, host: str, port: int, tls: Tls | None) -> tuple[grpc.aio.Server, int]:
        server = self._make()
        where = f"{host}:{port}"
        port = server.add_secure_port(where, tls.grpc_credentials()) if tls else server.add_insecure_port(where)
        await server.start()
        return server, port

    async def _restart_when_ended(self, server: grpc.aio.Server, host: str, port: int, tls: Tls | None) -> None:
        while True:
            try:
                while await server.wait_for_termination(LOOK_SECONDS):
                    pass
                return
            except Exception as error:  # noqa: BLE001 - the boundary: whatever ended the server, it is restarted
                _log.error("a request ended the server at %s:%d (%s): restarting it", host, port, error)
            await server.stop(0)
            while True:
                with contextlib.suppress(RuntimeError):  # another program took the port: retry
                    server, _ = await self._listening(host, port, tls)
                    break
                await asyncio.sleep(LOOK_SECONDS)
            self._server = server


class TokenInterceptor(grpc.aio.ServerInterceptor):  # pyright: ignore[reportMissingTypeArgument] - generic in the stubs only
    """Refuses calls without a token that `access` accepts; the methods in `own` require the stack's token itself."""

    def __init__(self, access: PortAccess, token: str, own: Collection[str] = ()) -> None:
        self._door = access
        self._token = token
        self._own = own

    @classmethod
    def at(cls, access: PortAccess, token: str, own: Collection[str] = ()) -> list[TokenInterceptor]:
        """Return the interceptors of a server; none without a token."""
        return [cls(access, token, own)] if token else []

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """See grpc.aio.ServerInterceptor."""
        authorization = authorization_of(handler_call_details.invocation_metadata)
        why = self._door.refusal(self._token, {"Authorization": authorization})
        if why is None and handler_call_details.method in self._own and not is_token_itself(authorization, self._token):
            why = OWN_NEEDED
        return await continuation(handler_call_details) if why is None else refusing(why)


def refusing(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that answers UNAUTHENTICATED without reading the request, so that decompressing it costs no memory."""

    async def refuse(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        with Aborted():
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

    return grpc.stream_unary_rpc_method_handler(refuse)


class Aborted:
    """Suppresses the error that `context.abort` raises in a handler and clears its traceback; grpc raises it again afterwards.

    grpc's context keeps that error, whose traceback and cause refer to the frames of the handler: without this, a reference cycle keeps the
    request of each refused call, up to 60 MiB, until garbage collection.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        """See above."""
        if not isinstance(error, grpc.aio.AbortError):
            return False
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return True


class Registrar:
    """Stand-in for a server when generated code adds its handlers; wraps each in `tolerant`."""

    def __init__(self, server: grpc.aio.Server, observe: Observe = lambda *_: None, check: Check = lambda *_: None) -> None:
        self._server = server
        self._observe = observe
        self._check = check

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Ignored: the same handlers are added by name, below."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add the methods of a service."""
        made = {name: tolerant(handler, name, self._observe, self._check) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, made),))


def tolerant(handler: Any, name: str = "", observe: Observe = lambda *_: None, check: Check = lambda *_: None) -> Any:
    """Wrap a handler with a single request to answer INVALID_ARGUMENT if it cannot be decoded, or `check` refuses it."""
    decode: Callable[[bytes], Any] = handler.request_deserializer

    def decoded(data: bytes) -> Any:
        try:
            request = decode(data)
            check(name, request)
        except DecodeError as error:
            return UsageError(f"these bytes are no such request: {error}")
        except UsageError as error:
            return error.with_traceback(None)  # its frames refer to the request
        return request

    async def refuse(error: UsageError, context: Any) -> None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    if handler.response_streaming:
        stream: Callable[[Any, Any], AsyncIterator[Any]] = handler.unary_stream

        async def many(request: Any, context: Any) -> AsyncIterator[Any]:
            with Aborted(), _observed(name, context, observe):
                if isinstance(request, UsageError):
                    await refuse(request, context)
                async for answer in stream(request, context):
                    yield answer

        return grpc.unary_stream_rpc_method_handler(many, decoded, handler.response_serializer)
    unary: Callable[[Any, Any], Awaitable[Any]] = handler.unary_unary

    async def one(request: Any, context: Any) -> Any:
        with Aborted(), _observed(name, context, observe):
            if isinstance(request, UsageError):
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
