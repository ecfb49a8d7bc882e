"""The process-wide telemetry of a user's process: it sends each span only to the stack of the span's attempt.

A process has one tracer provider, and may use several stores in turn or at once (a notebook, a test run, threads). So the exporter looks
up the destination by attempt; spans outside attempts are recorded in an active trace context, and not exported.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agl_otel.telemetry.otlp import OtlpExporter
from agl_otel.telemetry.setup import Telemetry, instrument_all
from agl_otel_hook.context import Key
from agl_otel_hook.hook import hook_of
from agl_otel_hook.processor import UNCOUNTED, key_of_attributes

SERVICE_NAME: Final = "agl-agent"
ROUTES_KEPT: Final = 100_000
_RECORDING: Final = otel_context.create_key("agl-otel-recording")


@dataclass(slots=True)
class Route:
    """Destination of the spans of some attempts. Mutable, because a stack may move."""

    endpoint: str
    """host:port of a collector's OTLP over gRPC."""
    token: str = field(default="", repr=False)
    http: str = ""
    """http(s)://host:port of the collector's OTLP over HTTP, for forks."""


class Recording:
    """The spans that ended within one trace context, in order of their ends."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def context(self, context: Context | None = None) -> Context:
        """Return a copy of `context` (None: the current one) whose spans are recorded here."""
        return otel_context.set_value(_RECORDING, self, context)


class Recorder(SpanProcessor):
    """Adds ended spans to the recording of the context in which they started."""

    def __init__(self) -> None:
        self._open: dict[int, Recording] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Remember the span's recording."""
        recording = otel_context.get_value(_RECORDING, parent_context)
        if isinstance(recording, Recording) and span.name not in UNCOUNTED:
            self._open[span.get_span_context().span_id] = recording

    def on_end(self, span: ReadableSpan) -> None:
        """Record the span."""
        context = span.get_span_context()
        recording = self._open.pop(context.span_id, None) if context is not None else None
        if recording is not None:
            recording.spans.append(span)

    def shutdown(self) -> None:
        """Do nothing: no spans are buffered."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Do nothing: no spans are buffered."""
        return True


class Routes:
    """The Route of each attempt; only the latest ROUTES_KEPT are kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[Key, Route] = {}

    def add(self, keys: Sequence[Key], route: Route) -> None:
        """Set the route of these attempts."""
        with self._lock:
            for key in keys:
                self._routes.pop(key, None)
                self._routes[key] = route
            while len(self._routes) > ROUTES_KEPT:
                del self._routes[next(iter(self._routes))]

    def of(self, span: ReadableSpan) -> tuple[str, str, str] | None:
        """Return (endpoint, token, http) for the span; None if it belongs to no known attempt."""
        key = key_of_attributes(span)
        route = self._routes.get(key) if key is not None else None
        return (route.endpoint, route.token, route.http) if route is not None else None


class RoutedExporter(SpanExporter):
    """Exports each span to its attempt's route."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._exporters: dict[tuple[str, str, str], OtlpExporter] = {}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send one request per stack; FAILURE if one of them fails."""
        by_target: dict[tuple[str, str, str], list[ReadableSpan]] = {}
        for span in spans:
            if (target := self._routes.of(span)) is not None:
                by_target.setdefault(target, []).append(span)
        results = [self._exporter(target).export(part) for target, part in by_target.items()]
        return SpanExportResult.SUCCESS if all(r is SpanExportResult.SUCCESS for r in results) else SpanExportResult.FAILURE

    def _exporter(self, target: tuple[str, str, str]) -> OtlpExporter:
        exporter = self._exporters.get(target)
        if exporter is None:
            exporter = self._exporters[target] = OtlpExporter(*target)
        return exporter

    def shutdown(self) -> None:
        """Close every connection."""
        for exporter in self._exporters.values():
            exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Do nothing: no spans are buffered."""
        return True


class ProcessTelemetry(Telemetry):
    """Telemetry that exports by `routes`. Use `process_telemetry()` to get it."""

    def __init__(self) -> None:
        self.routes = Routes()
        existing = trace.get_tracer_provider()
        hook = hook_of(existing)
        super().__init__(
            service_name=os.environ.get("OTEL_SERVICE_NAME", SERVICE_NAME),
            exporter=lambda: RoutedExporter(self.routes),
            provider=existing if isinstance(existing, TracerProvider) else None,
            hook=hook,
        )
        if hook is not None:
            hook.stored_elsewhere = lambda span: self.routes.of(span) is not None
        self._provider.add_span_processor(Recorder())

    def instrument(self) -> None:
        """Enable all installed instrumentations that are not enabled yet."""
        instrument_all()


_lock = threading.Lock()
_telemetry: ProcessTelemetry | None = None


def process_telemetry() -> ProcessTelemetry:
    """Return this process's telemetry. The first call sets up the SDK, or extends an existing provider."""
    global _telemetry
    with _lock:
        if _telemetry is None:
            _telemetry = ProcessTelemetry()
            _telemetry.install()
        return _telemetry


def shut_down() -> None:
    """Seal and flush this process's telemetry, if any, in processes whose exit runs no atexit functions."""
    if _telemetry is not None:
        _telemetry.shutdown()
