"""Jaeger's remote storage v2 on gRPC, the backend that `jaeger_storage.backends.NAME.grpc` configures in a Jaeger.

Read-only: Jaeger's writes are refused, because spans come in through the collector. Optional methods (FindTraceSummaries, FindSpans)
answer UNIMPLEMENTED, and Jaeger falls back to the others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.protobuf.timestamp_pb2 import Timestamp
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from agl_otel.errors import AglError, UsageError, grpc_status
from agl_otel.net import auth
from agl_otel.net.grpc_server import GrpcPort, TokenInterceptor, tolerant
from agl_otel.net.tls import Tls
from agl_otel.store import Store
from agl_otel.traces.trace_query import DEFAULT_LIMIT, TraceQuery
from agl_otel.web.jaeger.cut import fitted
from agl_otel.web.jaeger.proto import storage_pb2 as pb
from agl_otel.web.jaeger.spans import pages_of, traces_data

MAX_MESSAGE_BYTES: Final = 64 << 20
READER: Final = "jaeger.storage.v2.TraceReader"
DEPENDENCIES: Final = "jaeger.storage.v2.DependencyReader"
Context = grpc.aio.ServicerContext[Any, Any]
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),  # else a second service would silently share the port
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_NOT_A_TIME: Final = (ValueError, OverflowError)  # raised by protobuf's ToNanoseconds
_log = logging.getLogger(__name__)


class JaegerStorage:
    """The methods of TraceReader and DependencyReader, over an open store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def get_services(self, _: object) -> pb.GetServicesResponse:
        """List the services."""
        return pb.GetServicesResponse(services=await self._store.services())

    async def get_operations(self, request: pb.GetOperationsRequest) -> pb.GetOperationsResponse:
        """List the operations of a service."""
        found = await self._store.operations(request.service, request.span_kind.capitalize())
        return pb.GetOperationsResponse(operations=[pb.Operation(name=name, span_kind=kind.lower()) for name, kind in found])

    async def find_trace_ids(self, request: pb.FindTracesRequest) -> pb.FindTraceIDsResponse:
        """Find the ids of matching traces, the latest first."""
        found = await self._store.find_traces(query_of(request.query))
        ids = [
            pb.FoundTraceID(trace_id=bytes.fromhex(each.trace_id), start=_time(each.start_nano), end=_time(each.end_nano)) for each in found
        ]
        return pb.FindTraceIDsResponse(trace_ids=ids)

    async def get_traces(self, request: pb.GetTracesRequest) -> AsyncIterator[TracesData]:
        """Stream the traces with these ids; unknown ids are skipped."""
        async for data in self._traces([each.trace_id.hex() for each in request.query]):
            yield data

    async def find_traces(self, request: pb.FindTracesRequest) -> AsyncIterator[TracesData]:
        """Stream matching traces, the latest first."""
        async for data in self._traces([each.trace_id for each in await self._store.find_traces(query_of(request.query))]):
            yield data

    async def get_dependencies(self, request: pb.GetDependenciesRequest) -> pb.GetDependenciesResponse:
        """Count the calls between services."""
        found = await self._store.dependencies(request.start_time.ToNanoseconds(), request.end_time.ToNanoseconds())
        return pb.GetDependenciesResponse(
            dependencies=[pb.Dependency(parent=caller, child=called, call_count=count) for caller, called, count in found]
        )

    async def _traces(self, trace_ids: Sequence[str]) -> AsyncIterator[TracesData]:
        async for found, attempts in pages_of(self._store, trace_ids):
            for spans in found:
                made = traces_data(spans, attempts)
                messages = map(fitted, made)
                while (data := await asyncio.to_thread(next, messages, None)) is not None:  # encoding a large trace takes seconds
                    yield data


def query_of(params: pb.TraceQueryParameters) -> TraceQuery:
    """Convert a search from the wire. Raises UsageError for unsupported parameters."""
    if params.filter or params.pagination:
        raise UsageError("structured filters and pages are not served: search by service, operation, tags, times and durations")
    return TraceQuery(
        service=params.service_name,
        operation=params.operation_name,
        tags={pair.key: text_of(pair.value) for pair in params.attributes},
        min_duration=params.duration_min.ToNanoseconds(),
        max_duration=params.duration_max.ToNanoseconds(),
        limit=params.search_depth or DEFAULT_LIMIT,
        start_nano=params.start_time_min.ToNanoseconds(),
        end_nano=params.start_time_max.ToNanoseconds() or TraceQuery.end_nano,
    )


def text_of(value: pb.AnyValue) -> str:
    """Format a tag's value as the text that the trace store holds for attributes. Raises UsageError for other types."""
    kind = value.WhichOneof("value")
    if kind == "bool_value":
        return "true" if value.bool_value else "false"
    if kind in ("string_value", "int_value"):
        return str(getattr(value, kind))
    if kind == "double_value":
        return repr(value.double_value).removesuffix(".0")
    raise UsageError("a tag is searched for by a text, a number or a boolean")


def _time(nano: int) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(nano)
    return stamp


class JaegerServer:
    """The gRPC server of both services. Call `start`, then `stop`."""

    def __init__(self, store: Store, token: str = "") -> None:
        self._token = token
        self._storage = JaegerStorage(store)
        self._listener = GrpcPort(self._make, "AGL_JAEGER_PORT or --jaeger-port")
        self.port = 0

    async def start(self, host: str, port: int, tls: Tls | None = None) -> None:
        """Listen on host:port (0: any free port). Raises InUseError if the port is in use."""
        self.port = await self._listener.start(host, port, tls)

    async def stop(self, grace_seconds: float = 2.0) -> None:
        """Refuse new calls, and give running ones `grace_seconds` to end."""
        await self._listener.stop(grace_seconds)

    def _make(self) -> grpc.aio.Server:
        server = grpc.aio.server(interceptors=TokenInterceptor.at(auth.JAEGER, self._token), options=_OPTIONS)
        server.add_generic_rpc_handlers(
            tuple(grpc.method_handlers_generic_handler(name, self._handlers(name)) for name in (READER, DEPENDENCIES))
        )
        return server

    def _handlers(self, service: str) -> dict[str, Any]:
        storage = self._storage
        if service == DEPENDENCIES:
            return {"GetDependencies": self._unary(storage.get_dependencies, pb.GetDependenciesRequest)}
        return {
            "GetServices": self._unary(storage.get_services, pb.GetOperationsRequest),  # its request has no fields
            "GetOperations": self._unary(storage.get_operations, pb.GetOperationsRequest),
            "FindTraceIDs": self._unary(storage.find_trace_ids, pb.FindTracesRequest),
            "GetTraces": self._stream(storage.get_traces, pb.GetTracesRequest),
            "FindTraces": self._stream(storage.find_traces, pb.FindTracesRequest),
        }

    def _unary(self, method: Callable[[Any], Any], request_type: Any) -> Any:
        async def call(request: Any, context: Context) -> Any:
            try:
                return await method(request)
            except AglError as error:
                await _abort(context, error)
            except _NOT_A_TIME as error:
                await _abort(context, UsageError(f"a time or duration is out of its range: {error}"))

        return tolerant(grpc.unary_unary_rpc_method_handler(call, request_type.FromString, _serialised))

    def _stream(self, method: Callable[[Any], AsyncIterator[TracesData]], request_type: Any) -> Any:
        async def call(request: Any, context: Context) -> AsyncIterator[TracesData]:
            try:
                async for data in method(request):
                    yield data
            except AglError as error:
                await _abort(context, error)
            except _NOT_A_TIME as error:
                await _abort(context, UsageError(f"a time or duration is out of its range: {error}"))

        return tolerant(grpc.unary_stream_rpc_method_handler(call, request_type.FromString, _serialised))


def _serialised(message: Any) -> bytes:
    return message.SerializeToString()


async def _abort(context: Context, error: AglError) -> NoReturn:
    await context.abort(grpc.StatusCode[grpc_status(error)], str(error))
    raise AssertionError("abort raises")
