"""Values that OTLP cannot encode are exported as text; others are unchanged."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode

from agl_otel_hook.well_formed import mended
from agl_otel_hook.writable import writable

CONTEXT = SpanContext(1, 2, is_remote=False)
HUGE = 1 << 64


def span(name: str = "n", **fields: Any) -> ReadableSpan:
    return ReadableSpan(name, CONTEXT, resource=Resource({}), instrumentation_scope=InstrumentationScope("s"), **fields)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("cut \ud83d", "cut \N{REPLACEMENT CHARACTER}"),
        ("\ud83d\ude00", "\N{GRINNING FACE}"),
        (HUGE, "18446744073709551616"),
        (-HUGE, "-18446744073709551616"),
        ((1, HUGE), ("1", "18446744073709551616")),
        (("a", "\udcff"), ("a", "\N{REPLACEMENT CHARACTER}")),
        ({"a": ["\ud83d"]}, {"a": ("\N{REPLACEMENT CHARACTER}",)}),
    ],
)
def test_a_value_that_otlp_cannot_encode_becomes_text(value: Any, written: Any) -> None:
    found = writable(span(attributes={"bad": value, "good": 1}))
    assert found.attributes == {"bad": written, "good": 1}
    (encoded,) = encode_spans([found]).resource_spans[0].scope_spans[0].spans
    assert [each.key for each in encoded.attributes] == ["bad", "good"]


def test_every_text_of_a_span_is_checked() -> None:
    half, whole = "\ud83d", "\N{REPLACEMENT CHARACTER}"
    (encoded,) = (
        encode_spans(
            [
                writable(
                    span(
                        name=half,
                        attributes={half: half},
                        events=[Event(half, {"e": half}, 7)],
                        links=[Link(CONTEXT, {"l": half})],
                        status=Status(StatusCode.ERROR, half),
                        start_time=1,
                        end_time=2,
                    )
                )
            ]
        )
        .resource_spans[0]
        .scope_spans[0]
        .spans
    )
    assert (encoded.name, encoded.status.message, encoded.start_time_unix_nano, encoded.end_time_unix_nano) == (whole, whole, 1, 2)
    assert [(each.key, each.value.string_value) for each in encoded.attributes] == [(whole, whole)]
    assert [(each.name, each.time_unix_nano, each.attributes[0].value.string_value) for each in encoded.events] == [(whole, 7, whole)]
    assert encoded.links[0].attributes[0].value.string_value == whole


@pytest.mark.parametrize(
    "value",
    [
        "",
        "plain",
        "\N{SNAKE}",
        0,
        (1 << 63) - 1,
        -(1 << 63),
        True,
        1.5,
        float("nan"),
        b"\xff",
        (),
        (1, 2),
        (0.5, float("inf")),
        ("a",),
        None,
    ],
)
def test_an_encodable_span_is_returned_unchanged(value: Any) -> None:
    given_span = span(attributes={"a": value}, status=Status(StatusCode.ERROR), events=[Event("e", None, 1)])
    assert writable(given_span) is given_span


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_is_encodable_after_mended(text: str) -> None:
    assert mended(text).encode().decode() == mended(text)
    assert mended(text) == text or any("\ud800" <= each <= "\udfff" for each in text)
