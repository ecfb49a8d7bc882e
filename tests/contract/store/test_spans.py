"""What 0.3's users rely on of spans, over a real stack: what was added is there when the call returns."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode

from agl_otel.errors import DataError
from agl_otel.store import LightningStore
from agl_otel.store.spans import REQUEST_SPANS
from agl_otel.types import AttemptedRollout, AttemptStatus, Event, OtelResource, Span
from agl_otel_hook import conventions

KINDS: dict[str, Any] = {
    "text": "ä\n", "int": -3, "big": 2**60, "double": math.pi, "yes": True, "no": False,
    "texts": ["a", "b"], "ints": [1, 2], "doubles": [0.5, 1.0], "bools": [True, False],
}  # fmt: skip


def span_of(rollout: AttemptedRollout, name: str = "work", sequence: int = 1, **more: Any) -> Span:
    return Span.from_attributes(
        attributes=more.pop("attributes", {}),
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=sequence,
        name=name,
        start_time=more.pop("start_time", time.time()),
        **more,
    )


def sdk_spans() -> list[ReadableSpan]:
    """A parent with everything on it, and its child."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "agent", "n": 3}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("my.scope", "1.2")
    with tracer.start_as_current_span("parent", kind=SpanKind.CLIENT, attributes=KINDS) as parent:
        parent.add_event("said", {"n": 1, "ok": True})
        parent.set_status(Status(StatusCode.ERROR, "broke"))
        tracer.start_span("child", links=[Link(parent.get_span_context(), {"why": "because"})]).end()
    provider.shutdown()
    return sorted(exporter.get_finished_spans(), key=lambda span: span.name == "child")


async def test_a_span_comes_back_as_it_was_added(store: LightningStore, begun: AttemptedRollout) -> None:
    span = span_of(begun, sequence=7, attributes=KINDS, parent_id="00000000000000ab", end_time=time.time() + 1)
    span.resource = OtelResource(attributes={"service.name": "s", "n": 1})
    span.events = [Event(name="e", attributes={"k": [1, 2]}, timestamp=1_700_000_000.25, time_unix_nano=1_700_000_000_250_000_000)]
    assert await store.add_span(span) is span
    (found,) = await store.query_spans(begun.rollout_id)
    fields = """rollout_id attempt_id sequence_id trace_id span_id parent_id name status start_time end_time attributes events links
        context parent"""
    for field in fields.split():
        assert getattr(found, field) == getattr(span, field), field
    assert {key: found.resource.attributes[key] for key in ("service.name", "n")} == span.resource.attributes


async def test_a_span_of_the_sdk_comes_back_exactly_and_takes_the_next_number(store: LightningStore, begun: AttemptedRollout) -> None:
    parent, child = sdk_spans()
    assert await store.get_next_span_sequence_id(begun.rollout_id, begun.attempt.attempt_id) == 1
    added = [await store.add_otel_span(begun.rollout_id, begun.attempt.attempt_id, span) for span in (parent, child)]
    assert [span.sequence_id for span in added if span] == [2, 3]
    found = await store.query_spans(begun.rollout_id, begun.attempt.attempt_id)
    assert [span.name for span in found] == ["parent", "child"]
    for was, now in zip(added, found, strict=True):
        assert was is not None
        now.resource.attributes = {key: value for key, value in now.resource.attributes.items() if key in was.resource.attributes}
        if was.parent is not None:  # what was remote, only its maker knows
            assert now.parent is not None and now.parent.span_id == was.parent.span_id
        assert now == was
    assert found[0].start_time_unix_nano == parent.start_time
    assert (found[0].kind, found[0].status.description, found[1].links[0].attributes) == ("Client", "broke", {"why": "because"})


async def test_adding_raises_the_counter_and_an_explicit_number_is_kept(store: LightningStore, begun: AttemptedRollout) -> None:
    span = await store.add_otel_span(begun.rollout_id, begun.attempt.attempt_id, sdk_spans()[0], sequence_id=41)
    assert span is not None and span.sequence_id == 41
    again = await store.start_attempt(begun.rollout_id)
    keys = [(begun.rollout_id, again.attempt.attempt_id), (begun.rollout_id, begun.attempt.attempt_id), ("ro-nobody", "at-nobody")]
    assert await store.get_many_span_sequence_ids(keys) == [42, 43, 1]


async def test_a_span_that_is_there_already_is_left_out(store: LightningStore, begun: AttemptedRollout) -> None:
    first, second = span_of(begun, "first"), span_of(begun, "second")
    assert await store.add_many_spans([first, first]) == [first]
    assert await store.add_span(first) is None
    assert await store.add_many_spans([second, first]) == [second]
    assert [span.name for span in await store.query_spans(begun.rollout_id)] == ["first", "second"]
    assert await store.add_many_spans([]) == []


async def test_spans_with_ids_of_zero_are_stored_under_ids_of_their_own(store: LightningStore, begun: AttemptedRollout) -> None:
    zeros = [span_of(begun, name, trace_id="0" * 32, span_id="0" * 16) for name in ("first", "second")]
    added = await store.add_many_spans(zeros)
    assert [(span.name, span.trace_id, span.span_id) for span in await store.query_spans(begun.rollout_id)] == [
        (span.name, span.trace_id, span.span_id) for span in added
    ]
    assert all(span.trace_id.strip("0") and span.span_id.strip("0") for span in added)


async def test_a_span_of_no_attempt_is_a_value_error_and_nothing_is_stored(store: LightningStore, begun: AttemptedRollout) -> None:
    good, lost = span_of(begun), span_of(begun)
    lost.attempt_id = "at-none"
    with pytest.raises(ValueError, match="at-none"):
        await store.add_many_spans([good, lost])
    with pytest.raises(ValueError, match="ro-none"):
        await store.add_otel_span("ro-none", "at-none", sdk_spans()[0])
    assert list(await store.query_spans(begun.rollout_id)) == []


async def test_an_id_that_is_no_hex_is_a_value_error_and_a_time_that_cannot_be_stored_is_refused(
    store: LightningStore, begun: AttemptedRollout
) -> None:
    with pytest.raises(ValueError, match="32 hex digits"):
        await store.add_span(span_of(begun, trace_id="trace-1"))
    with pytest.raises(DataError, match="before 2000"):
        await store.add_span(span_of(begun, start_time=1.0))


async def test_one_refused_span_does_not_block_the_others(store: LightningStore, begun: AttemptedRollout) -> None:
    count = 2 * REQUEST_SPANS + 10
    wrong = {3: 1.0, REQUEST_SPANS + 3: time.time() + 10 * 86400, count - 1: 1.0}
    spans = [span_of(begun, span_id=f"{number + 1:016x}", start_time=wrong.get(number, time.time())) for number in range(count)]
    with pytest.raises(DataError, match=r"refused 3 spans: .*before 2000"):
        await store.add_many_spans(spans)
    stored = await store.query_spans(begun.rollout_id)
    assert {span.span_id for span in stored} == {span.span_id for number, span in enumerate(spans) if number not in wrong}


async def test_a_span_without_times_starts_when_it_is_added(store: LightningStore, begun: AttemptedRollout) -> None:
    before = time.time()
    await store.add_span(span_of(begun, start_time=None))
    (found,) = await store.query_spans(begun.rollout_id)
    assert found.start_time is not None and found.start_time == found.end_time and before - 1 < found.start_time < time.time() + 1


async def test_a_span_sets_attempt_and_rollout_running_and_counts_as_heartbeat(store: LightningStore, begun: AttemptedRollout) -> None:
    await store.add_span(span_of(begun))
    found = await store.get_rollout_by_id(begun.rollout_id)
    assert isinstance(found, AttemptedRollout) and (found.status, found.attempt.status) == ("running", "running")
    assert found.attempt.last_heartbeat_time == pytest.approx(time.time(), abs=300)


async def test_a_late_span_revives_an_unresponsive_attempt_but_never_an_ended_one(store: LightningStore, begun: AttemptedRollout) -> None:
    becomes: dict[AttemptStatus, AttemptStatus] = {
        "unresponsive": "running", "timeout": "timeout", "failed": "failed", "succeeded": "succeeded",
    }  # fmt: skip
    for status, expected in becomes.items():
        await store.update_attempt(begun.rollout_id, "latest", status=status)
        assert await store.add_span(span_of(begun)) is not None
        attempt = await store.get_latest_attempt(begun.rollout_id)
        assert attempt is not None and attempt.status == expected
    found = await store.get_rollout_by_id(begun.rollout_id)
    assert found is not None and found.status == "succeeded"


async def test_spans_carry_ids_that_are_not_those_of_their_attributes(store: LightningStore, begun: AttemptedRollout) -> None:
    span = span_of(begun, attributes={conventions.ROLLOUT_ID: "ro-elsewhere", conventions.SEQUENCE_ID: 99}, sequence=5)
    await store.add_span(span)
    (found,) = await store.query_spans(begun.rollout_id)
    assert (found.attempt_id, found.sequence_id) == (begun.attempt.attempt_id, 5)


@pytest.fixture
async def five(store: LightningStore, begun: AttemptedRollout) -> list[Span]:
    """Five spans of two attempts: a tree in the first, one span in the second."""
    root = span_of(begun, "agent.run", 5, trace_id="aa" * 16, span_id="01" * 8)
    tools = [span_of(begun, f"tool.{n}", n, trace_id="aa" * 16, parent_id=root.span_id, start_time=2e9 - n) for n in (1, 2)]
    other = span_of(begun, "agent.end", 3, trace_id="bb" * 16)
    again = await store.start_attempt(begun.rollout_id)
    late = span_of(again, "agent.run", 9)
    spans = [root, *tools, other, late]
    for span in tools:
        span.start_time = time.time() - span.sequence_id
    await store.add_many_spans(spans)
    return spans


async def test_spans_are_found_by_every_filter(store: LightningStore, five: list[Span]) -> None:
    root, one, two, end, late = five
    rollout = root.rollout_id

    async def found(attempt: str | None = None, **filters: Any) -> list[Span]:
        keys = {(span.trace_id, span.span_id): span for span in five}
        return [keys[span.trace_id, span.span_id] for span in await store.query_spans(rollout, attempt, **filters)]

    assert await found() == [one, two, end, root, late]
    assert await found("latest") == [late]
    assert await found(root.attempt_id, name="agent.run") == [root]
    assert await found(trace_id="aa" * 16) == [one, two, root]
    assert await found(trace_id_contains="bbbb") == [end]
    assert await found(span_id=root.span_id) == [root] == await found(span_id_contains="010101010101")
    assert await found(parent_id=root.span_id) == [one, two] == await found(parent_id_contains="0101")
    assert await found(name_contains="tool") == [one, two]
    assert await found(name_contains="tool", parent_id=root.span_id, span_id=two.span_id) == [two]
    assert await found(name="agent.end", parent_id=root.span_id, filter_logic="or") == [one, two, end]
    assert await found(late.attempt_id, name="tool.1", filter_logic="or") == []  # the attempt holds in any case
    assert await found(name="' OR 1 = 1 --") == []


async def test_spans_are_sorted_and_paged(store: LightningStore, five: list[Span]) -> None:
    rollout = five[0].rollout_id
    by_start = await store.query_spans(rollout, sort_by="start_time", limit=2)
    assert ([span.name for span in by_start], by_start.total) == (["tool.2", "tool.1"], 5)
    page = await store.query_spans(rollout, sort_order="desc", limit=2, offset=3)
    assert ([span.sequence_id for span in page], page.total, page.offset) == ([2, 1], 5, 3)
    behind = await store.query_spans(rollout, limit=2, offset=10)
    assert (list(behind), behind.total) == ([], 5)
    nothing = await store.query_spans(rollout, limit=0)
    assert (list(nothing), nothing.total) == ([], 5)
    with pytest.raises(ValueError, match="sorted by 'colour'"):
        await store.query_spans(rollout, sort_by="colour")


async def test_the_latest_attempt_of_an_unattempted_rollout_has_no_spans(store: LightningStore) -> None:
    queued = await store.enqueue_rollout("task")
    assert list(await store.query_spans(queued.rollout_id, "latest")) == list(await store.query_spans("ro-none")) == []


async def test_traces_are_read_in_one_go(store: LightningStore, begun: AttemptedRollout) -> None:
    held = {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): 0.5}
    await store.add_many_spans([span_of(begun), span_of(begun, conventions.SPAN_ANNOTATION, 2, attributes=held)])
    traces = await store.traces([begun], deadline_seconds=0)
    key = (begun.rollout_id, begun.attempt.attempt_id)
    assert (traces.spans, [reward.value for reward in traces.rewards[key]], traces.verdicts[key].kind) == (2, [0.5], "unproven")
