"""The root spans of attempts, exported and acked before their agents start: an agent waits for this one call, so it is a short one.

From the event loop itself: over the SDK's processors three threads would pass each other the span and its ack, and every hand-over costs
an idle machine some tenths of a millisecond. A root span carries its ids and no marker and is counted nowhere, so nothing is passed by.
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
from agl_otel.runner.completion import persist
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
        """One span for each (rollout, attempt), acked; their traceparents. `hooked` says that their agents run under our hook.

        A collector that is away is asked again for `seconds`, with the same spans. Raises UnavailableError, AglError where it refuses.
        """
        now = time.time_ns()
        contexts = [new_root() for _ in keys]
        spans = [self._span(key, context, hooked, now) for key, context in zip(keys, contexts, strict=True)]
        await persist(partial(self._export, encode(spans)), seconds=seconds)
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
            text = f"the collector at {self._endpoint} did not take the spans of attempts that start: {error.details()}"
            raise (UnavailableError(text) if error.code() in RETRYABLE else from_grpc(error.code().name, text)) from error
        rejected = ExportTraceServiceResponse.FromString(reply).partial_success if reply else None
        if rejected is not None and rejected.rejected_spans:
            _log.warning("the collector rejected the spans of %d attempts: %s", rejected.rejected_spans, rejected.error_message)
