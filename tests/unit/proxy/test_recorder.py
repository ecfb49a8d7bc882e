from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from agl_otel.proxy.attempts import Attempts
from agl_otel.proxy.dialects import CHAT
from agl_otel.proxy.recorder import Recorder
from agl_otel_hook.ledger import Ledger
from agl_otel_hook.whole import WholeSpans

KEY = ("ro-1", "at-1")


def request_messages(body: Mapping[str, Any]) -> list[Any]:
    return [{"role": "user", "content": body["text"]}]


def test_a_call_that_cannot_be_recorded_counts_as_dropped_and_blocks_no_other() -> None:
    """As in a custom dialect that fails on an unusual request."""
    exported: list[ReadableSpan] = []
    idle: list[tuple[str, str]] = []
    ledger, attempts = Ledger(), Attempts(lambda _: None)
    recorder = Recorder(WholeSpans("proxy", Resource({}), ledger, export=exported.append, on_idle=idle.append), attempts)
    dialect = replace(CHAT, messages=request_messages)
    for body in ({"text": "a"}, {}, {"text": "b"}):
        recorder.ended(recorder.start(KEY, dialect, body, None))
    recorder.settle()
    count = ledger.count(KEY)
    assert count is not None and (count.spans, count.dropped, count.open) == (2, 1, 0)
    assert (len(exported), recorder.counts["unrecorded"], recorder.unsettled) == (2, 1, False)
    assert attempts.active(KEY) == 0 and idle == [KEY]
