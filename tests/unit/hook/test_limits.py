"""Limits on attributes, and agents that write ours: whatever becomes of a span's attributes, it is counted as what is stored of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl_otel.telemetry.setup import Telemetry
from agl_otel_hook import conventions
from agl_otel_hook.context import with_ids
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.processor import AttemptProcessor, key_of_attributes, marker_of
from agl_otel_hook.records import Records, folder_of, key_of, read
from agl_otel_hook.seal import Sealer

KEY = ("ro-with-a-long-name", "at-with-a-long-name")
SHORT: Any = SpanLimits(max_span_attribute_length=3)
FEW: Any = SpanLimits(max_span_attributes=4)
NONE: Any = SpanLimits(max_span_attributes=0)


def many(span: Any) -> None:
    for number in range(9):
        span.set_attribute(f"of the agent {number}", "some text")


def its_own(span: Any) -> None:
    span.set_attributes({conventions.ROLLOUT_ID: "ro-other", conventions.ATTEMPT_ID: "at-other", conventions.PROCESS: "0" * 16})


WAYS: dict[str, tuple[Any, Callable[[Any], None]]] = {
    "short values": (SHORT, many),
    "few attributes": (FEW, many),
    "no attributes": (NONE, many),
    "both": (SpanLimits(max_span_attributes=4, max_span_attribute_length=3), many),
    "the agent's own ids": (SpanLimits(), its_own),
    "the agent's own ids, short": (SHORT, its_own),
}


def counted(root: Path) -> tuple[int, int, int, int]:
    (process,) = read(folder_of(root, *KEY), key_of(*KEY))
    assert process.slot is not None
    return process.slot.begun, process.slot.ended, process.slot.abandoned, process.slot.dropped


def ledger(root: Path) -> Ledger:
    folder_of(root, *KEY).mkdir()
    return Ledger(lambda: Records(str(root)))


@pytest.mark.parametrize("exporter_first", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_span_is_exported_with_its_ids_and_counted_whatever_happened_to_its_attributes(
    tmp_path: Path, way: str, exporter_first: bool
) -> None:
    limits, act = WAYS[way]
    counting, exporter, provider = ledger(tmp_path), InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False, span_limits=limits)
    processors: list[SpanProcessor] = [SimpleSpanProcessor(exporter), AttemptProcessor(counting, fallback=KEY)]
    for processor in processors if exporter_first else reversed(processors):
        provider.add_span_processor(processor)
    span = provider.get_tracer("a").start_span("work", attributes={"first": 1})
    act(span)
    span.end()
    (exported,) = exporter.get_finished_spans()
    assert (key_of_attributes(exported), marker_of(exported)) == (KEY, counting.marker)
    assert counted(tmp_path) == (1, 1, 0, 0)
    if act is many and limits is FEW:  # what the SDK has kept of the agent's stays, and what it has dropped is told
        assert (exported.attributes or {})["of the agent 8"] == "some text" and exported.dropped_attributes > 0


def test_a_late_span_stays_late_whatever_its_limits(tmp_path: Path) -> None:
    counting, exporter, provider = ledger(tmp_path), InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False, span_limits=FEW)
    for processor in (SimpleSpanProcessor(exporter), AttemptProcessor(counting, fallback=KEY)):
        provider.add_span_processor(processor)
    first = provider.get_tracer("a").start_span("first")
    read(folder_of(tmp_path, *KEY), key_of(*KEY), last=True)
    late = provider.get_tracer("a").start_span("late")
    for span in (first, late):
        many(span)
        span.end()
    assert [(span.attributes or {}).get(conventions.LATE) for span in exporter.get_finished_spans()] == [None, True]
    assert counted(tmp_path) == (1, 1, 0, 0)


def test_a_sampled_span_whose_ids_are_taken_out_counts_as_ended(tmp_path: Path) -> None:
    """A reader then misses it; counted as abandoned, it would be lost without a trace."""

    class Redacts(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            span._attributes = {}  # pyright: ignore[reportPrivateUsage]  # as redacting processors do

    counting, provider = ledger(tmp_path), TracerProvider(shutdown_on_exit=False)
    for processor in (Redacts(), AttemptProcessor(counting, fallback=KEY)):
        provider.add_span_processor(processor)
    provider.get_tracer("a").start_span("work").end()
    assert counted(tmp_path) == (1, 1, 0, 0)


@pytest.mark.parametrize("limits", [SHORT, FEW, NONE])
def test_a_seal_has_its_ids_and_counts_whatever_the_limits(limits: Any) -> None:
    counting, exporter, provider = Ledger(), InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False, span_limits=limits)
    for processor in (AttemptProcessor(counting, fallback=KEY), SimpleSpanProcessor(exporter)):
        provider.add_span_processor(processor)
    provider.get_tracer("a").start_span("work").end()
    Sealer(counting, provider, lambda _: True).seal([KEY], timeout_seconds=1, closing=True)
    _, seal = exporter.get_finished_spans()
    assert (key_of_attributes(seal), marker_of(seal)) == (KEY, counting.marker)
    attributes = seal.attributes or {}
    names = (conventions.SEAL_SPANS, conventions.SEAL_DROPPED, conventions.SEAL_CLOSING)
    assert [attributes.get(name) for name in names] == [1, 0, True]


@pytest.mark.parametrize("limits", [SHORT, FEW, NONE])
def test_a_process_with_limits_on_attributes_exports_and_takes_each_span_once(limits: Any) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False, span_limits=limits)
    telemetry = Telemetry(service_name="test", exporter=lambda: exporter, provider=provider)
    telemetry.attempt_spans([KEY], hooked=True)
    span: Any = telemetry.tracer("agent").start_span("work", with_ids(KEY, Context()))
    many(span)
    span.end()
    telemetry.take(KEY, [span])  # what a function returns
    (count,) = telemetry.seal_counts([KEY]).values()
    telemetry.shutdown()
    found = [(span.name, key_of_attributes(span)) for span in exporter.get_finished_spans()]
    assert count.spans == 1
    assert found == [(name, KEY) for name in (conventions.SPAN_ATTEMPT, "work", conventions.SPAN_SEAL)]
