"""Export the root spans of attempts; the collector acknowledges them before the agents start.

Every agent waits for this call, so it runs on the event loop: the SDK's processors would hand span and ack over between three threads, at
some tenths of a millisecond each. The exporter may skip the processors because root spans carry no process marker and are not counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind

from agl_otel.errors import UnavailableError, from_grpc
from agl_otel.net.tls import aio_channel
from agl_otel.runner.completion import retry_unavailable
from agl_otel.telemetry.otlp import CALL_SECONDS, METHOD, RETRYABLE
from agl_otel_hook import conventions
from agl_otel_hook.context import Key, format_traceparent
from agl_otel_hook.ids import new_root
from agl_otel_hook.seal import TRACER_NAME
from agl_otel_hook.whole import WholeSpan
from agl_otel_hook.wire import encode

_SCOPE: Final = InstrumentationScope(TRACER_NAME)
_log = logging.getLogger(__name__)


class RootSpans:
    """Exports to the collector at `collector_grpc` (host:port, or https://host:port) over a connection of its own."""

    def __init__(self, collector_grpc: str, resource: Resource, *, token: str = "") -> None:
        self._resource = resource
        self._channel = aio_channel(collector_grpc)
        self._call: Any = self._channel.unary_unary(METHOD, None, None)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._endpoint = collector_grpc

    async def export(self, keys: Sequence[Key], *, hooked: bool, seconds: float) -> list[str]:
        """Export one root span for each (rollout id, attempt id); return their traceparents in that order.

        `hooked` says that the agents run under the hook. Retries with the same spans for `seconds` while the collector is unavailable.
        Raises UnavailableError after that, and AglError where the collector refuses the spans.
        """
        now = time.time_ns()
        contexts = [new_root() for _ in keys]
        spans = [self._span(key, context, hooked, now) for key, context in zip(keys, contexts, strict=True)]
        await retry_unavailable(partial(self._export, encode(spans)), seconds=seconds)
        return [*map(format_traceparent, contexts)]

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    def _span(self, key: Key, context: SpanContext, hooked: bool, now: int) -> WholeSpan:
        ids: dict[str, Any] = {
            conventions.ROLLOUT_ID: key[0],
            conventions.ATTEMPT_ID: key[1],
            **({conventions.ATTEMPT_HOOKED: True} if hooked else {}),
        }
        return WholeSpan(
            conventions.SPAN_ATTEMPT, context, None, self._resource, ids,
            kind=SpanKind.INTERNAL, instrumentation_scope=_SCOPE, start_time=now, end_time=now,
        )  # fmt: skip

    async def _export(self, request: bytes) -> None:
        try:
            reply: bytes = await self._call(request, timeout=CALL_SECONDS, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            text = f"the collector at {self._endpoint} did not take root spans: {error.details()}"
            raise (UnavailableError(text) if error.code() in RETRYABLE else from_grpc(error.code().name, text)) from error
        rejected = ExportTraceServiceResponse.FromString(reply).partial_success if reply else None
        if rejected is not None and rejected.rejected_spans:
            _log.warning("the collector rejected %d root spans: %s", rejected.rejected_spans, rejected.error_message)
