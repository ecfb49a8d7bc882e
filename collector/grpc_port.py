"""OTLP over gRPC, on raw bytes: only translates between the wire and `Intake`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from agl_otel.collector.intake import METADATA
from agl_otel.collector.receive import Receiver, status_of
from agl_otel.collector.signals import PROTOCOLS, Protocol
from agl_otel.errors import AglError, TooLargeError, grpc_status
from agl_otel.net.auth import Admission, admission, authorization_of
from agl_otel.net.compress import too_large
from agl_otel.net.grpc_server import Aborted, refusing

BARRIER_METHOD: Final = "/agl.collector.v1.Collector/Barrier"
METHODS: Final = (*(protocol.method for protocol in PROTOCOLS), BARRIER_METHOD)
_Context = grpc.aio.ServicerContext[bytes, bytes]
_Handle = Callable[[bytes, _Context, Admission], Awaitable[bytes]]
IDLE_SECONDS: Final = 600.0
AGE_SECONDS: Final = 3600.0
TRANSPORT_PERCENT: Final = 125
"""gRPC itself refuses a message larger than this share of the limit, unseen by any handler; what is between is refused, and counted, here.
For that it is read, which takes three times its bytes for a moment."""
_MAX_LENGTH: Final = (1 << 31) - 1  # gRPC's options are of 32 bits
GRACE_SECONDS: Final = 120.0
"""Grace period of a connection past its maximum age; a request still incomplete then is ended, because its sender has stalled."""


def grpc_options(
    max_message_bytes: int, *, idle_seconds: float = IDLE_SECONDS, age_seconds: float = AGE_SECONDS, grace_seconds: float = GRACE_SECONDS
) -> list[tuple[str, int]]:
    """Return the server's options: limits, one process per port, keepalive behind idle balancers, an end to idle and stalled clients.

    A connection ends with GOAWAY: clients open a new one without an error.
    """
    return [
        ("grpc.so_reuseport", 0),  # otherwise gRPC silently shares a port with another process
        ("grpc.max_receive_message_length", min(TRANSPORT_PERCENT * max_message_bytes // 100, _MAX_LENGTH)),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", 60_000),  # detects a dead client within 80 s
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_connection_idle_ms", round(idle_seconds * 1000)),
        ("grpc.max_connection_age_ms", round(age_seconds * 1000)),
        ("grpc.max_connection_age_grace_ms", round(grace_seconds * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),  # exporters may ping every 10 s
    ]


def grpc_server(receiver: Receiver, max_message_bytes: int) -> grpc.aio.Server:
    """Make a server with the handlers below; it does not listen yet."""
    server = grpc.aio.server(options=grpc_options(max_message_bytes))
    server.add_generic_rpc_handlers((GrpcHandlers(receiver),))
    return server


class GrpcHandlers(grpc.GenericRpcHandler):  # pyright: ignore[reportMissingTypeArgument] - generic in the stubs only
    """Handlers of the three signals and of the barrier, and an error message for every other method."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        handlers = {protocol.method: self._export(protocol) for protocol in PROTOCOLS} | {BARRIER_METHOD: self._barrier}
        self._calls = {method: self._answering(handler) for method, handler in handlers.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        """Return the handler of a call; that of an unauthorised call reads no request."""
        method = handler_call_details.method
        if (call := self._calls.get(method)) is not None:
            authorization = authorization_of(handler_call_details.invocation_metadata)
            found = admission(self._receiver.token, authorization, sending=method != BARRIER_METHOD)
            if found.refusal is not None:
                self._receiver.refusals.add("grpc", "unauthorized", found.refusal)
                return refusing(found.refusal)
            return grpc.unary_unary_rpc_method_handler(partial(call, admitted=found))

        async def unknown(_: Any, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
            message = f"this port has no method {method}; it has {', '.join(METHODS)}"
            self._receiver.refusals.add("grpc", "unknown_path", message)
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

        return grpc.stream_stream_rpc_method_handler(unknown)  # the most general form, which suits any client

    def _export(self, protocol: Protocol) -> _Handle:
        async def handle(raw: bytes, context: _Context, admitted: Admission) -> bytes:
            self._receiver.check(protocol)
            sent = [(key, value) for key, value in context.invocation_metadata() or () if key in METADATA and isinstance(value, str)]
            outcome = await self._receiver.intake.take(protocol.signal, raw, dict(reversed(sent)), admitted.sender)  # the first of several
            return protocol.answer(outcome).SerializeToString()

        return handle

    async def _barrier(self, _: bytes, __: _Context, ___: Admission) -> bytes:
        await self._receiver.writer.barrier()
        return b""

    def _answering(self, handler: _Handle) -> Any:
        async def call(raw: bytes, context: _Context, admitted: Admission) -> bytes:
            with Aborted():
                try:
                    if len(raw) > self._receiver.max_message_bytes:
                        raise TooLargeError(f"{too_large(self._receiver.max_message_bytes)} (AGL_MAX_MESSAGE_BYTES)")
                    return await handler(raw, context, admitted)
                except AglError as error:
                    self._receiver.refusals.add_error("grpc", error)
                    trailing = (("grpc-status-details-bin", status_of(error).SerializeToString()),)
                    await context.abort(grpc.StatusCode[grpc_status(error)], str(error), trailing)
            return b""  # which an aborted call does not send

        return call
