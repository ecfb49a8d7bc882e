from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace import Event as OtelEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext as OtelContext
from opentelemetry.trace import TraceFlags, TraceState
from pydantic import ValidationError

from agl_otel.types import (
    LLM,
    Event,
    Link,
    OtelResource,
    PaginatedResult,
    PromptTemplate,
    ProxyLLM,
    Resource,
    Span,
    SpanContext,
    SpanCoreFields,
    SpanNames,
    TraceStatus,
    convert_timestamp,
)
from agl_otel_hook import conventions

STATE = TraceState([("vendor", "v")])
CONTEXT = OtelContext(0xAB, 0xCD, is_remote=False, trace_flags=TraceFlags(1), trace_state=STATE)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(None, None), (0, None), (12.5, 12.5), (1_700_000_000.5, 1_700_000_000.5), (1_700_000_000_500_000_000, 1_700_000_000.5)],
)
def test_a_time_is_seconds_or_nanoseconds_by_its_size(given: float | None, seconds: float | None) -> None:
    assert convert_timestamp(given) == seconds


def test_a_span_of_the_sdk_becomes_a_model() -> None:
    span = ReadableSpan(
        "n", context=CONTEXT, parent=CONTEXT, attributes={"a": (1, 2)}, events=[OtelEvent("e", {"k": "v"}, timestamp=2 * 10**18)],
        start_time=10**18, end_time=2 * 10**18,
    )  # fmt: skip
    found = Span.from_opentelemetry(span, "ro-1", "at-1", 3)
    assert (found.trace_id, found.span_id, found.parent_id) == ("0" * 30 + "ab", "0" * 14 + "cd", "0" * 14 + "cd")
    assert (found.attributes, found.start_time, found.end_time_unix_nano) == ({"a": [1, 2]}, 1e9, 2 * 10**18)
    assert found.context == found.parent == SpanContext(trace_id=found.trace_id, span_id=found.span_id, trace_state={"vendor": "v"})
    assert (found.events[0].timestamp, found.sequence_id, found.status.status_code) == (2e9, 3, "UNSET")


def test_a_span_without_a_context_has_ids_of_zero() -> None:
    found = Span.from_opentelemetry(ReadableSpan("n"), "ro-1", "at-1", 1)
    assert (found.trace_id, found.span_id, found.context, found.start_time) == ("0" * 32, "0" * 16, None, None)


def test_fields_of_an_sdk_spans_subclass_are_kept() -> None:
    class Mine(ReadableSpan):
        def __init__(self) -> None:
            super().__init__("n")
            self.score = {"x": 1}
            self.strange = object

    dumped = Span.from_opentelemetry(Mine(), "ro-1", "at-1", 1).model_dump()
    assert (dumped["score"], dumped["strange"]) == ({"x": 1}, str(object))


def test_a_span_made_of_attributes_has_random_ids_and_is_ok() -> None:
    first, second = (Span.from_attributes(attributes={"k": 1}) for _ in range(2))
    assert first.trace_id != second.trace_id and len(bytes.fromhex(first.trace_id)) == 16 and len(bytes.fromhex(first.span_id)) == 8
    assert (first.name, first.rollout_id, first.attempt_id, first.sequence_id) == (conventions.SPAN_VIRTUAL, "", "", 0)
    assert (first.status, first.resource, first.parent, first.start_time) == (TraceStatus(status_code="OK"), OtelResource(), None, None)
    child = Span.from_attributes(attributes={}, parent_id=first.span_id, trace_id=first.trace_id, status=TraceStatus(status_code="ERROR"))
    assert child.parent == SpanContext(trace_id=first.trace_id, span_id=first.span_id) and child.status.status_code == "ERROR"


def test_a_span_made_of_core_fields_without_a_start_starts_now() -> None:
    core = SpanCoreFields(name="n", attributes={"k": 1}, end_time=5.0)
    found = Span.from_core_fields(core, rollout_id="ro-1", sequence_id=2)
    assert (found.name, found.rollout_id, found.sequence_id, found.end_time) == ("n", "ro-1", 2, 5.0)
    assert found.start_time == pytest.approx(time.time(), abs=5)
    assert Span.from_core_fields(replace(core, start_time=1.0)).start_time == 1.0


def test_unknown_fields_of_a_span_are_kept_and_a_status_is_one_of_three() -> None:
    span = Span.model_validate({**Span.from_attributes(attributes={}).model_dump(), "mine": 1})
    assert span.model_dump()["mine"] == 1
    with pytest.raises(ValidationError):
        Span.model_validate({**span.model_dump(), "status": {"status_code": "FINE"}})


def test_names_of_spans_are_strings() -> None:
    assert SpanNames.REWARD == "agentlightning.reward" and SpanNames.ROLLOUT_ID == conventions.ROLLOUT_ID


def test_a_page_acts_as_its_items() -> None:
    page = PaginatedResult(items=["a", "b"], limit=2, offset=1, total=9)
    assert (len(page), page[0], page[-1], list(page), "b" in page, page.total) == (2, "a", "b", ["a", "b"], True, 9)


def test_resources_are_of_one_family() -> None:
    llm = ProxyLLM(endpoint="http://p/v1/", model="m", api_key="k", sampling_parameters={"t": 0})
    assert isinstance(llm, LLM) and isinstance(llm, Resource) and llm.resource_type == "proxy_llm"
    assert llm.get_base_url(None, None) == "http://p/v1/" and LLM(endpoint="http://m", model="").get_base_url("ro-1", "at-1") == "http://m"
    assert PromptTemplate(template="{a}!", engine="f-string").format(a=1) == "1!"
    with pytest.raises(NotImplementedError, match="jinja"):
        PromptTemplate(template="{{a}}", engine="jinja").format(a=1)


@pytest.mark.parametrize(
    ("template", "text"),
    [("{a} {b!r:>5} {{d}}", "1   'x' {d}"), ("{a:.2f}{a:,}", "1.001"), ("{any name}", "y"), ("plain", "plain")],
)
def test_a_prompt_takes_values_by_their_names(template: str, text: str) -> None:
    assert PromptTemplate(template=template, engine="f-string").format(a=1, b="x", **{"any name": "y"}) == text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{llm.api_key}", r"\{llm\.api_key\} reaches into a value: name plain values only, and pass what is in them by names of their own"),
        ("{task.__init__.__globals__[os].environ[AGL_TOKEN]}", r"__globals__\[os\].* reaches into a value"),
        ("{task[0]!r}", r"\{task\[0\]!r\} reaches into a value"),
        ("{a:>1000000000}", r"\{a:>1000000000\} asks for a width"),
        ("{a:.\N{ARABIC-INDIC DIGIT NINE}99f}", "asks for a width"),
        ("{a:>{b}}", r"\{a:>\{b\}\} asks for a width .* that a value gives"),
        ('{"a": {"b": 1}}', "braces that are meant are written twice"),
        ("{a", "braces that are meant are written twice"),
    ],
)
def test_a_models_prompt_cannot_read_attributes_or_exhaust_memory(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PromptTemplate(template=template, engine="f-string").format(a=1, b=2, task="x", llm=LLM(endpoint="", model="", api_key="secret"))


def test_bytes_are_base64_everywhere_in_json() -> None:
    raw = b"\xff\xfe>"
    held = {"bytes": raw, "list": [raw, "text", 1], "map": {"deep": [{"in": raw}]}, "plain": [1, 2], "none": None}
    shown = {"bytes": "//4+", "list": ["//4+", "text", 1], "map": {"deep": [{"in": "//4+"}]}, "plain": [1, 2], "none": None}
    made = Span.from_attributes(attributes=held, resource=OtelResource(attributes=held))
    made.events = [Event(name="e", attributes=held)]
    made.links = [Link(context=SpanContext(trace_id="1", span_id="2"), attributes=held)]
    for dumped in (made.model_dump(mode="json"), json.loads(made.model_dump_json())):
        places = [dumped, dumped["resource"], dumped["events"][0], dumped["links"][0]]
        assert [place["attributes"] for place in places] == [shown] * 4
    assert made.model_dump()["attributes"] == held
