"""The one telemetry of a user's process: its spans go to the stack that their attempt belongs to, and to nobody else's.

A process has one tracer provider, and may use several stores one after the other or at once (a notebook, a test run, threads).
So the exporter looks up where an attempt's spans go; spans of no attempt are recorded where somebody listens, and not exported.
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
    """Where the spans of some attempts go. Its fields may change: a stack may move."""

    endpoint: str
    """host:port of a collector's OTLP over gRPC."""
    token: str = field(default="", repr=False)
    http: str = ""
    """http(s)://host:port of its OTLP over HTTP, for forks."""


class Recording:
    """The spans that ended within one trace context, in that order."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def context(self, context: Context | None = None) -> Context:
        """`context` (None: the current one) in which spans are recorded here."""
        return otel_context.set_value(_RECORDING, self, context)


class Recorder(SpanProcessor):
    """Hands ended spans to the recording of the context that they started in."""

    def __init__(self) -> None:
        self._open: dict[int, Recording] = {}

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Note whose it is (OpenTelemetry calls this)."""
        recording = otel_context.get_value(_RECORDING, parent_context)
        if isinstance(recording, Recording) and span.name not in UNCOUNTED:
            self._open[span.get_span_context().span_id] = recording

    def on_end(self, span: ReadableSpan) -> None:
        """Record it (OpenTelemetry calls this)."""
        context = span.get_span_context()
        recording = self._open.pop(context.span_id, None) if context is not None else None
        if recording is not None:
            recording.spans.append(span)

    def shutdown(self) -> None:
        """Nothing is held here."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is held here."""
        return True


class Routes:
    """{attempt: where its spans go}; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._routes: dict[Key, Route] = {}

    def add(self, keys: Sequence[Key], route: Route) -> None:
        """From now on the spans of these attempts go there."""
        with self._lock:
            for key in keys:
                self._routes.pop(key, None)
                self._routes[key] = route
            while len(self._routes) > ROUTES_KEPT:
                del self._routes[next(iter(self._routes))]

    def of(self, span: ReadableSpan) -> tuple[str, str, str] | None:
        """(endpoint, token, http) for the span; None where it belongs to no attempt that is known here."""
        key = key_of_attributes(span)
        route = self._routes.get(key) if key is not None else None
        return (route.endpoint, route.token, route.http) if route is not None else None


class RoutedExporter(SpanExporter):
    """Sends each span where its attempt's route says."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._exporters: dict[tuple[str, str, str], OtlpExporter] = {}

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """One request for each stack; FAILURE where one of them did not take its part."""
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
        """Nothing is held here."""
        return True


class ProcessTelemetry(Telemetry):
    """Telemetry whose spans go where `routes` says. Get it with `process_telemetry()`."""

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
        """Switch on what is installed and not on yet."""
        instrument_all()


_lock = threading.Lock()
_telemetry: ProcessTelemetry | None = None


def process_telemetry() -> ProcessTelemetry:
    """This process's telemetry; the first call sets the SDK up (or adds to the provider that is there already)."""
    global _telemetry
    with _lock:
        if _telemetry is None:
            _telemetry = ProcessTelemetry()
            _telemetry.install()
        return _telemetry


def shut_down() -> None:
    """Seal and flush, where this process has a telemetry: for processes whose end runs no atexit functions."""
    if _telemetry is not None:
        _telemetry.shutdown()
