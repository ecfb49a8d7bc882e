"""Refused requests are counted by reason; the log has one line a minute of each."""

from __future__ import annotations

import logging

import pytest

from agl_otel.collector.refusals import MAX_CHARACTERS, QUIET_SECONDS, Refusals
from agl_otel.errors import ConflictError, CrowdedError, DataError


def test_a_reason_logs_one_line_a_minute_with_the_number_since_then(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    refusals = Refusals(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            refusals.add_error("http", DataError(f"no OTLP {number}"))
        refusals.add_error("grpc", CrowdedError("too many"))
        assert caplog.messages == [
            "refused 1 request (malformed), the last over http: no OTLP 0",
            "refused 1 request (crowded), the last over grpc: too many",
        ]
        now[0] += QUIET_SECONDS
        refusals.add_error("grpc", DataError("no OTLP 5"))
    assert caplog.messages[2:] == ["refused 5 requests (malformed), the last over grpc: no OTLP 5"]
    assert refusals.counts == {("malformed", "http"): 5, ("malformed", "grpc"): 1, ("crowded", "grpc"): 1}


def test_a_strangers_text_is_bounded_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    Refusals().add("http", "unknown_path", "\x1b[2J\n" + "x" * 10_000)
    (line,) = caplog.messages
    assert line.isprintable() and "\\x1b" in line
    assert len(line) < MAX_CHARACTERS + 100


def test_an_error_that_refuses_no_request_is_not_counted() -> None:
    refusals = Refusals()
    refusals.add_error("http", ConflictError("it is being deleted"))
    assert not refusals.counts


def test_items_refused_alone_log_one_line_a_minute_of_each_signal(caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    refusals = Refusals(clock=lambda: now[0])
    with caplog.at_level(logging.WARNING):
        refusals.add_items("traces", 1, "1 × an invalid id")
        refusals.add_items("traces", 3, "3 × too old")
        refusals.add_items("logs", 2, "2 × too old")
        now[0] += QUIET_SECONDS
        refusals.add_items("traces", 1, "1 × too old\n" + "x" * 1000)
    first, logs, later = caplog.messages
    assert first == "refused 1 item of traces in accepted requests, the last: 1 × an invalid id"
    assert logs == "refused 2 items of logs in accepted requests, the last: 2 × too old"
    assert later.startswith("refused 4 items of traces in accepted requests, the last: 1 × too old") and later.isprintable()
    assert len(later) < MAX_CHARACTERS + 100
    assert not refusals.counts
