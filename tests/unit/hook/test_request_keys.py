"""Keys that requests bring to a shared service: their lifetime, the exports with them, and other spans beside them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from agl_otel.net.auth import attempt_ingest_key
from agl_otel_hook import conventions, request_keys
from agl_otel_hook.export import MAX_BATCH_SPANS, ExportProcessor
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.processor import key_of_attributes
from agl_otel_hook.request_keys import KeyedExporter, RequestKeys

SENT: list[tuple[str, list[str]]] = []
"""Exports so far: (key, names of spans)."""


class Exporter(SpanExporter):
    """Fake with the constructor of OpenTelemetry's OTLP exporters; without headers it has the key of the environment: none."""

    def __init__(self, headers: dict[str, str] | None = None) -> None:
        self._key = (headers or {}).get("authorization", "").removeprefix("Bearer ")

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        SENT.append((self._key, [span.name for span in spans]))
        return SpanExportResult.SUCCESS if self._key else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        SENT.append((self._key, ["closed"]))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    SENT.clear()
    return Clock()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def keys(ledger: Ledger, clock: Clock) -> RequestKeys:
    return RequestKeys(ledger, clock=clock)


def key(number: int) -> str:
    return attempt_ingest_key("secret", f"ro-{number}", f"at-{number}")


def bring(keys: RequestKeys, text: str) -> None:
    keys.extract({conventions.HEADER_OTLP_KEY: text}, Context())


def test_a_key_outlives_the_spans_of_its_attempt_and_is_never_replaced(keys: RequestKeys, ledger: Ledger, clock: Clock) -> None:
    for number in (1, 2):
        bring(keys, key(number))
    bring(keys, key(1)[:-1] + "x")
    ledger.started(("ro-1", "at-1"), 7, (1, 2))
    clock.now += request_keys.KEPT_SECONDS + 1
    bring(keys, key(3))
    assert [keys.of((f"ro-{number}", f"at-{number}")) for number in (1, 2, 3)] == [key(1), "", key(3)]
    ledger.ended(("ro-1", "at-1"), 7, marker=None)
    clock.now += request_keys.KEPT_SECONDS + 1
    bring(keys, key(4))
    assert [keys.of((f"ro-{number}", f"at-{number}")) for number in (1, 3, 4)] == ["", "", key(4)]


def test_the_least_recently_used_key_is_evicted(keys: RequestKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_keys, "MAX_KEYS", 2)
    bring(keys, key(1))
    bring(keys, key(2))
    assert keys.of(("ro-1", "at-1")) == key(1)
    bring(keys, key(3))
    assert [keys.of((f"ro-{number}", f"at-{number}")) for number in (1, 2, 3)] == [key(1), "", key(3)]


@pytest.mark.parametrize("text", ["", "aglo-", "secret", key(1).removeprefix("aglo-"), "aglo-a b/c-0", "aglo-ro-1-0"])
def test_a_malformed_key_is_ignored_and_nothing_is_injected(keys: RequestKeys, text: str) -> None:
    bring(keys, text)
    assert keys.of(("ro-1", "at-1")) == "" and keys.of(None) == ""
    bring(keys, key(1))
    carrier: dict[str, str] = {}
    keys.inject(carrier)
    assert carrier == {}


def test_spans_are_exported_with_the_key_of_their_attempt_in_separate_requests(keys: RequestKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_keys, "MAX_EXPORTERS", 1)
    dropped: list[str] = []

    def key_of(span: ReadableSpan) -> str:
        return keys.of(key_of_attributes(span))

    for number in (1, 2):
        bring(keys, key(number))
    exporter = KeyedExporter(Exporter(), key_of)

    def drop(spans: Sequence[ReadableSpan]) -> None:
        dropped.extend(span.name for span in spans)

    processor = ExportProcessor(exporter, rebuild=Exporter, takes=lambda span: True, on_dropped=drop, apart=key_of)
    provider = TracerProvider()
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("test")
    for place in range(2 * MAX_BATCH_SPANS):
        number = place % 4  # 0: no attempt; 3: an attempt without a key
        ids = {conventions.ROLLOUT_ID: f"ro-{number}", conventions.ATTEMPT_ID: f"at-{number}"} if number else {}
        tracer.start_span(str(number), attributes=ids).end()
    assert not processor.force_flush(), "some were given up"
    names = {text: [name for each, names in SENT if each == text for name in names if name != "closed"] for text in ("", key(1), key(2))}
    half = MAX_BATCH_SPANS // 2
    assert names[key(1)] == ["1"] * half and names[key(2)] == ["2"] * half
    assert sorted(names[""]) == sorted(dropped) == ["0"] * half + ["3"] * half, "what has no key takes nobody else's spans with it"
    assert (key(1), ["closed"]) in SENT or (key(2), ["closed"]) in SENT
