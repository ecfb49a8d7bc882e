"""Writes spans, log records and figures by OTLP requests to a collector, which acks them when they are readable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import aiohttp
from google.protobuf.message import DecodeError
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse

from agl_otel.errors import DataError, UnavailableError
from agl_otel.net.tls import connector
from agl_otel.queue.client import QueueClient
from agl_otel.service.retry import retry
from agl_otel.store.otlp import LOGS_PATH, METRICS_PATH, TRACES_PATH
from agl_otel.text import error_text
from agl_otel_hook import conventions

CALL_SECONDS: Final = 60.0  # an insert behind others may take seconds
RETRY_SECONDS: Final = 10.0  # longer than a collector takes to restart
NOTHING_INHERITED: Final = {conventions.HEADER_INHERIT: conventions.INHERIT_NONE}


class SpanWriter:
    """Sends spans to the collector registered at `queue`."""

    def __init__(self, queue: QueueClient, *, token: str = "") -> None:
        self._queue = queue
        self._headers = {"Content-Type": "application/x-protobuf", conventions.HEADER_ACK: "stored"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None
        self._url: str | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def write(self, requests: Iterable[bytes], *, inherits: bool = True) -> None:
        """Send serialised ExportTraceServiceRequests; their spans are readable when this returns.

        Unless `inherits`, spans that name no rollout stay without one, whoever opened their trace.

        Raises DataError if the collector refuses spans (all others of all requests are stored), UnavailableError if no collector accepts
        them.
        """
        refused, reasons = 0, list[str]()
        for request in requests:
            try:
                answer = await self._sent(TRACES_PATH, request, {} if inherits else NOTHING_INHERITED)
            except DataError as error:
                sent = ExportTraceServiceRequest.FromString(request)
                refused += sum(len(scope.spans) for resource in sent.resource_spans for scope in resource.scope_spans)
                reasons.append(str(error))
                continue
            partial = ExportTraceServiceResponse.FromString(answer).partial_success
            if partial.rejected_spans:
                refused += partial.rejected_spans
                reasons.append(partial.error_message)
        if refused:
            raise DataError(f"the collector refused {refused} spans: {'; '.join(dict.fromkeys(reasons))}")

    async def write_metrics(self, request: ExportMetricsServiceRequest) -> None:
        """Send metrics in the same way; points that the collector refuses are dropped."""
        await self._sent(METRICS_PATH, request.SerializeToString())

    async def write_logs(self, request: bytes) -> None:
        """Send a serialised ExportLogsServiceRequest; its records are readable when this returns.

        Raises DataError if the collector refuses records, UnavailableError if no collector accepts them.
        """
        partial = ExportLogsServiceResponse.FromString(await self._sent(LOGS_PATH, request)).partial_success
        if partial.rejected_log_records:
            raise DataError(f"the collector refused {partial.rejected_log_records} log records: {partial.error_message}")

    async def _sent(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> bytes:
        return await retry(lambda: self._post(path, body, headers), seconds=RETRY_SECONDS)

    async def _post(self, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        url = self._url or (await self._queue.describe()).collector_http
        if url is None:
            raise UnavailableError("the stack has no collector (yet): is `agl-otel up` running?")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers, timeout=aiohttp.ClientTimeout(total=CALL_SECONDS), connector=connector()
            )
        try:
            async with self._session.post(url + path, data=body, headers=headers) as response:
                code, answer = response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            self._url = None
            raise UnavailableError(f"the collector at {url} does not answer: {error_text(error)}") from None
        self._url = url  # kept while the collector answers
        if code == 200:
            return answer
        kind = UnavailableError if code in (429, 502, 503, 504) else DataError
        raise kind(f"the collector at {url} answers {code}: {_message(answer)}")


def _message(answer: bytes) -> str:
    try:
        return Status.FromString(answer).message
    except DecodeError:
        return answer[:500].decode(errors="replace")
