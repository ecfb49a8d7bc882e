from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl_otel.errors import UnavailableError
from agl_otel.telemetry.setup import Telemetry
from agl_otel_hook import conventions
from agl_otel_hook import seal as seals
from agl_otel_hook.arrays import pack_doubles, pack_ints
from agl_otel_hook.context import attempt_scope, parse_traceparent, with_ids
from agl_otel_hook.ledger import Ledger
from tests.otlp_receiver import OtlpReceiver

KEY = ("ro-1", "at-1")


@pytest.fixture
def telemetry(receiver: OtlpReceiver) -> Iterator[Telemetry]:
    telemetry = Telemetry(otlp_endpoint=receiver.grpc_address, token="secret", service_name="test")
    yield telemetry
    telemetry.shutdown()


def test_an_attempt_span_is_stored_before_its_traceparent_is_returned(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    traceparents = telemetry.attempt_spans([KEY, ("ro-2", "at-2")])
    first, second = receiver.spans(conventions.SPAN_ATTEMPT)
    assert (first.key, second.key, first.marker, first.parent_id) == (KEY, ("ro-2", "at-2"), None, "")
    assert traceparents[0] == f"00-{first.trace_id}-{first.span_id}-01"
    assert first.start == first.end
    assert receiver.exports == 1
    assert receiver.metadata["authorization"] == "Bearer secret"


def test_spans_in_an_attempt_scope_have_ids_marker_and_parent_and_are_sealed(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    traceparent = telemetry.attempt_span(*KEY)
    tracer = telemetry.tracer("agent")
    with attempt_scope(*KEY, traceparent=traceparent), tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
        pass
    tracer.start_span("outside").end()
    counts = telemetry.seal([KEY, ("ro-9", "at-9")])
    outer, inner, outside = (receiver.spans(name)[0] for name in ("outer", "inner", "outside"))
    assert counts == {KEY: {outer.marker: 2}, ("ro-9", "at-9"): {}}
    assert outer.key == inner.key == KEY and inner.marker == outer.marker
    parent = parse_traceparent(traceparent)
    assert parent is not None and outer.parent_id == f"{parent.span_id:016x}"
    assert outside.attributes == {}
    assert receiver.seals() == {outer.marker: (2, 0)}
    seal = receiver.spans(conventions.SPAN_SEAL)[0]
    assert seal.key == KEY and seal.trace_id == outer.trace_id and seal.start == seal.end


def test_an_unchanged_attempt_is_not_sealed_twice(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    telemetry.tracer("t").start_span("a", with_ids(KEY, Context())).end()
    assert telemetry.seal([KEY]) == telemetry.seal([KEY])
    assert len(receiver.spans(conventions.SPAN_SEAL)) == 1


def test_a_forgotten_attempt_comes_back_under_a_new_marker(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    tracer = telemetry.tracer("t")
    tracer.start_span("a", with_ids(KEY, Context())).end()
    first = telemetry.seal([KEY])[KEY]
    telemetry.forget(*KEY)
    tracer.start_span("b", with_ids(KEY, Context())).end()
    second = telemetry.seal([KEY])[KEY]
    assert list(first.values()) == list(second.values()) == [1]
    assert first.keys() != second.keys()


def test_seal_raises_while_the_collector_is_unavailable_and_loses_nothing(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    receiver.refuse = True
    telemetry.tracer("t").start_span("a", with_ids(KEY, Context())).end()
    with pytest.raises(UnavailableError, match="ro-1/at-1"):
        telemetry.seal([KEY], timeout_seconds=0.3)
    receiver.refuse = False
    assert list(telemetry.seal([KEY], timeout_seconds=300)[KEY].values()) == [1]
    assert len(receiver.spans("a")) == 1


def test_a_burst_larger_than_the_queue_is_exported_without_loss(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    tracer = telemetry.tracer("t")
    context = with_ids(KEY, Context())
    for _ in range(12_000):
        tracer.start_span("s", context).end()
    (count,) = telemetry.seal_counts([KEY], timeout_seconds=300).values()
    assert (count.spans, count.dropped) == (12_000, 0)
    assert len(receiver.spans("s")) == 12_000


def test_packed_arrays_arrive_as_otlp_arrays(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    ids, logprobs = [0, 1, 127, 128, 151_643, 2**31], [-0.25, 0.0, -1e-9]
    attributes = {conventions.LLM_PROMPT_TOKEN_IDS: pack_ints(ids), conventions.LLM_RESPONSE_LOGPROBS: pack_doubles(logprobs)}
    telemetry.tracer("t").start_span(conventions.SPAN_LLM, with_ids(KEY, Context()), attributes=attributes).end()
    telemetry.seal([KEY])
    (span,) = receiver.spans(conventions.SPAN_LLM)
    assert span.attributes[conventions.LLM_PROMPT_TOKEN_IDS] == ids
    assert span.attributes[conventions.LLM_RESPONSE_LOGPROBS] == logprobs


def test_only_a_closing_seal_is_sent_while_a_span_is_open(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    with attempt_scope(*KEY):
        still_open = telemetry.tracer("test").start_span("open")
        telemetry.tracer("test").start_span("work").end()
    assert list(telemetry.seal([KEY])[KEY].values()) == [1]
    assert receiver.spans("work") and receiver.spans(conventions.SPAN_SEAL) == []
    telemetry.seal_counts([KEY], closing=True)
    still_open.end()
    telemetry.seal([KEY])
    sealed = [
        (seal.attributes[conventions.SEAL_SPANS], seal.attributes.get(conventions.SEAL_CLOSING))
        for seal in receiver.spans(conventions.SPAN_SEAL)
    ]
    assert sealed == [(1, True), (2, None)]


def test_a_process_that_does_not_know_when_attempts_end_repeats_its_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seals, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(seals, "REPEAT_SECONDS", (0.01, 0.02))
    exporter, ledger = InMemorySpanExporter(), Ledger()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sent = threading.Semaphore(0)

    def flush(_: float) -> bool:
        sent.release()
        return True

    before = set(threading.enumerate())
    sealer = seals.Sealer(ledger, provider, flush, repeats=True)
    started = time.time_ns()
    for number in (1, 2):
        ledger.ended(KEY, number, marker=ledger.started(KEY, number, (1, 2)).marker)
        sealer.idle(KEY)
        assert all(sent.acquire(timeout=300) for _ in range(3))
    times = [span.start_time or 0 for span in exporter.get_finished_spans()]
    counts = [(span.attributes or {})[conventions.SEAL_SPANS] for span in exporter.get_finished_spans()]
    assert counts == [1, 1, 1, 2, 2, 2]
    assert started < times[0] and times == sorted(set(times))
    for thread in set(threading.enumerate()) - before:
        thread.join(300)
        assert not thread.is_alive(), "nothing is due any more, and a thread that waits for ever would be left of every tracer"


def test_an_idle_attempt_is_sealed_automatically(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    telemetry.tracer("t").start_span("a", with_ids(KEY, Context())).end()
    receiver.wait_until(lambda spans: any(span.name == conventions.SPAN_SEAL for span in spans))


def test_an_invalid_rollout_id_sets_no_attributes(receiver: OtlpReceiver, telemetry: Telemetry) -> None:
    telemetry.tracer("t").start_span("a", with_ids(("no spaces please", "at-1"), Context())).end()
    telemetry.shutdown()
    assert receiver.spans("a")[0].attributes == {}
