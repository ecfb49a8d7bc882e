"""How full the export queue gets while the process ends, whatever other threads still do."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agl_otel_hook.export import MAX_BATCH_SPANS, ExportProcessor

SPANS = 20 * MAX_BATCH_SPANS


class Held(SpanExporter):
    """Exports only after `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.go.wait()
        self.exported += len(spans)
        return SpanExportResult.SUCCESS


def test_what_another_thread_makes_at_the_end_of_the_process_waits_until_a_batch_is_out() -> None:
    exporter, provider = Held(), TracerProvider()
    processor = ExportProcessor(exporter, rebuild=Held, takes=lambda _: True)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    made = 0

    def work() -> None:
        nonlocal made
        for _ in range(SPANS):
            tracer.start_span("busy").end()
            made += 1

    processor.is_ending = True
    busy = threading.Thread(target=work)
    busy.start()
    busy.join(0.5)
    assert busy.is_alive() and made <= 2 * MAX_BATCH_SPANS, "one batch is being exported, and one waits"
    exporter.go.set()
    busy.join()
    assert processor.force_flush()
    assert (exporter.exported, processor.dropped) == (SPANS, 0)
