from __future__ import annotations

import os

import pytest
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_exporter
from opentelemetry.sdk.trace.export import ConsoleSpanExporter

from agl_otel_hook import conventions, exporters, guard
from agl_otel_hook.otlp import LogExporter, SpanExporter


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "failures", guard.failures.copy())
    guard.failures.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")


def made(monkeypatch: pytest.MonkeyPatch, names: str, protocol: str = "", *, only_otlp: bool = False) -> list[type]:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", names)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    found = exporters.configured("traces", only_otlp=only_otlp)
    for exporter in found:
        exporter.shutdown()
    return [*map(type, found)]


@pytest.mark.parametrize("names, protocol", [("otlp", ""), ("otlp", "http/protobuf"), ("otlp_proto_http", "grpc")])
def test_http_is_sent_by_our_own_exporter(monkeypatch: pytest.MonkeyPatch, names: str, protocol: str) -> None:
    assert made(monkeypatch, names, protocol) == [SpanExporter]


def test_grpc_is_sent_by_the_sdks_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(monkeypatch, "otlp", "grpc") == [grpc_exporter.OTLPSpanExporter]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    assert made(monkeypatch, "otlp", "grpc") == [SpanExporter]


def test_others_are_those_of_the_sdk_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(monkeypatch, " console ,otlp, none") == [ConsoleSpanExporter, SpanExporter]
    assert made(monkeypatch, "console,otlp", only_otlp=True) == [SpanExporter]
    assert made(monkeypatch, "") == made(monkeypatch, "none") == []


def test_log_records_have_their_own_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "http/protobuf")
    assert [*map(type, exporters.configured("logs"))] == [LogExporter]


def test_a_missing_exporter_is_logged_with_its_remedy_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporters, "entry_points", lambda **_: ())
    assert made(monkeypatch, "otlp_proto_grpc,zipkin,otlp") == [SpanExporter]
    assert "pip install opentelemetry-exporter-otlp-proto-grpc" in caplog.text and guard.failures.total() == 2


def test_without_an_exporter_for_grpc_spans_go_to_the_collectors_http_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporters, "entry_points", lambda **_: ())
    monkeypatch.setenv(conventions.ENV_OTLP_HTTP, "http://127.0.0.1:4319")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    (exporter,) = exporters.configured("traces")
    assert exporter.url == "http://127.0.0.1:4319/v1/traces" and not guard.failures
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert SpanExporter().url == "http://127.0.0.1:4318/v1/traces"


def test_an_exporter_that_cannot_be_created_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "nonsense")
    assert made(monkeypatch, "otlp") == []
    assert "an OTLP endpoint begins with http:// or https://" in caplog.text


def test_the_environment_is_as_before_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.delenv("OTEL_LOGS_EXPORTER", raising=False)
    with exporters.in_environment(exporters.NONE):
        assert os.environ["OTEL_TRACES_EXPORTER"] == os.environ["OTEL_LOGS_EXPORTER"] == "none"
    assert os.environ["OTEL_TRACES_EXPORTER"] == "otlp" and "OTEL_LOGS_EXPORTER" not in os.environ
