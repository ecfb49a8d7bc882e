"""The command and configuration of the OpenTelemetry Collector."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agl_otel.settings import Settings
from agl_otel.stack import otelcol


@pytest.fixture
def program(tmp_path: Path) -> str:
    made = tmp_path / "collector"
    made.touch(0o755)
    return str(made)


def test_ignored_settings_are_named(program: str, caplog: pytest.LogCaptureFixture) -> None:
    on_server = {"collector": program, "clickhouse_url": "clickhouse://127.0.0.1/otel"}
    with caplog.at_level(logging.WARNING):
        otelcol.check(Settings.load(**on_server, max_message_bytes=1 << 20, max_in_flight_bytes=1 << 20))
    assert caplog.messages == []
    with caplog.at_level(logging.WARNING):
        otelcol.check(Settings.load(**on_server, metrics=False, max_span_attributes=5, disk_reserve_bytes=0))
    assert [message.split()[0] for message in caplog.messages] == ["AGL_METRICS", "AGL_MAX_SPAN_ATTRIBUTES", "AGL_DISK_RESERVE_BYTES"]
    assert all("does nothing" in message for message in caplog.messages)


def test_the_advertised_host_is_registered_with_and_without_tls() -> None:
    common = {"host": "0.0.0.0", "advertise": "box", "clickhouse_url": "clickhouse://127.0.0.1/otel"}
    names = ("AGL_OTELCOL_ANNOUNCE_GRPC", "AGL_OTELCOL_ANNOUNCE_HTTP", "AGL_OTELCOL_ANNOUNCE_CLICKHOUSE")
    plain = otelcol.environment(Settings.load(**common))
    assert [plain[name] for name in names] == ["box:4317", "http://box:4318", "http://box:8123"]
    secured = otelcol.environment(Settings.load(**common, tls_cert="cert.pem", tls_key="key.pem"))
    assert [secured[name] for name in names] == ["https://box:4317", "https://box:4318", "https://box:8123"]


def test_its_two_unauthenticated_ports_listen_on_loopback_only() -> None:
    settings = Settings.load(host="0.0.0.0", clickhouse_url="clickhouse://127.0.0.1/otel")
    assert otelcol.environment(settings)["AGL_OTELCOL_ADMIN_HOST"] == "127.0.0.1"
    for config in otelcol.configuration().parent.glob("*.yaml"):
        text = config.read_text()
        assert "${env:AGL_OTELCOL_ADMIN_HOST:-127.0.0.1}:${env:AGL_OTELCOL_HEALTH_PORT:-13133}" in text, config
        assert "host: ${env:AGL_OTELCOL_ADMIN_HOST:-127.0.0.1}\n                port: ${env:AGL_OTELCOL_METRICS_PORT:-8888}" in text, config


def test_every_configuration_bounds_idle_http_connections() -> None:
    for config in otelcol.configuration().parent.glob("*.yaml"):
        http = config.read_text().partition("      http:\n")[2].partition("\nprocessors:")[0]
        assert "read_header_timeout: ${env:AGL_OTELCOL_IDLE:-75s}" in http, config
        assert "keepalive:\n          idle_timeout: ${env:AGL_OTELCOL_IDLE:-75s}" in http, config
