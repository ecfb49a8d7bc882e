"""OpenTelemetry's event `gen_ai.evaluation.result` is a reward, on a span or as a log record, for every reader alike."""

from __future__ import annotations

import json
import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agl_otel.adapters.call_rewards import call_rewards
from agl_otel.adapters.records import to_transitions
from agl_otel.adapters.trajectories import final_reward
from agl_otel.spans.log_records import with_evaluations
from agl_otel.spans.rewards import LABELS, dimensions_of, evaluations_of, find_final_reward, unread_of
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.reader import TraceReader
from agl_otel.types import AttemptedRollout, Event
from agl_otel_hook import conventions
from tests.contract.store.test_sql_of_docs import query_of_docs
from tests.contract.traces.test_reader import attempt, call, insert, rollout, row

AT = 1_750_000_000


def evaluation(score: float | str | None = None, name: str = "correct", **other: str) -> dict[str, str]:
    kind = conventions.EVALUATION_LABEL if isinstance(score, str) else conventions.EVALUATION_SCORE
    return {conventions.EVALUATION_NAME: name, **({} if score is None else {kind: str(score)}), **other}


def events(*given: dict[str, str], at: float = AT) -> dict[str, Any]:
    return {
        "Events.Timestamp": [f"{at + place / 1000:.9f}" for place in range(len(given))],
        "Events.Name": [conventions.EVALUATION] * len(given),
        "Events.Attributes": list(given),
    }


def record(attributes: dict[str, str], at: float = AT, **other: Any) -> dict[str, Any]:
    ids = {"TraceId": "t", "SpanId": "s1", "RolloutId": "ro-1", "AttemptId": "at-1"}
    return {"Timestamp": f"{at:.9f}", "EventName": conventions.EVALUATION, "LogAttributes": attributes, **ids, **other}


def log(engine: TraceStore, *records: dict[str, Any]) -> None:
    for each in records:
        engine.insert("otel.otel_logs", sorted(each), [json.dumps(each).encode()])


async def rewards(reader: TraceReader) -> tuple[float | None, list[tuple[str, float]]]:
    """Return the reward of the attempt and all in order, after asking every reader: they must agree."""
    traces = await reader.traces([rollout()], [attempt()])
    found = traces.rewards.get(("ro-1", "at-1"), [])
    last = final_reward(found)
    (figures,) = await reader.figures([attempt()])
    (run,) = (await reader.run_figures(["ro-1"])).to_pylist()
    assert figures.reward == run["Reward"] == last
    assert figures.spans == traces.spans == run["Spans"], "records are no spans"
    records = await reader.evaluations(["ro-1"])
    if not records:
        (day,) = await reader.query(query_of_docs(), own=False)
        assert (day["mean"] if int(day["rewarded"]) else None) == last
    spans = with_evaluations(await reader.spans(["ro-1"]), records, whole=True)
    assert find_final_reward(spans) == last
    outline, _ = await reader.outline("ro-1", limit=100)
    assert {name: value for span in outline for name, value in span.rewards.items()}.keys() >= figures.rewards.keys()
    return last, [(each.name, each.value) for each in found]


async def test_an_evaluation_on_a_span_is_a_reward(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1), row(2, **events(evaluation(0.25, "style"), evaluation("Pass"))))
    assert await rewards(reader) == (1.0, [("style", 0.25), ("correct", 1.0)])


async def test_an_evaluation_as_a_log_record_is_a_reward(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1))
    older = record(evaluation(0.25, **{"event.name": conventions.EVALUATION}), EventName="")
    log(engine, older, older, record(evaluation("incorrect", "judge"), AT + 1), record(evaluation(7.0), RolloutId="ro-2"))
    assert await rewards(reader) == (0.0, [("correct", 0.25), ("judge", 0.0)])


async def test_the_last_one_counts_whatever_its_form(engine: TraceStore, reader: TraceReader) -> None:
    value = conventions.reward_value_key(0)

    def emitted(number: int, reward: float, **other: str) -> dict[str, Any]:
        return row(number, conventions.SPAN_ANNOTATION, {value: str(reward), **other}, Timestamp=f"{AT + number:.9f}")

    insert(engine, row(1), emitted(10, 0.1))
    log(engine, record(evaluation(0.2), AT + 11))
    assert await rewards(reader) == (0.2, [("", 0.1), ("correct", 0.2)])
    insert(engine, emitted(12, 0.3))
    assert (await rewards(reader))[0] == 0.3
    insert(engine, row(20, **events(evaluation(0.4), at=AT + 13)))
    assert (await rewards(reader))[0] == 0.4
    log(engine, record(evaluation(0.5), AT + 12.5), record(evaluation(0.9), AT + 99, RolloutId="ro-2"))
    assert await rewards(reader) == (0.4, [("", 0.1), ("correct", 0.2), ("", 0.3), ("correct", 0.5), ("correct", 0.4)])
    insert(engine, emitted(2, 0.6, **{conventions.REWARD_GIVEN: "true"}))
    assert (await rewards(reader))[0] == 0.6, "the runner's counts, whatever comes later"


@pytest.mark.parametrize("form", ["event", "record", "emitted"])
@pytest.mark.parametrize("value", ["nan", "-inf", "1e300"])
async def test_a_last_reward_that_is_not_usable_is_none_and_no_earlier_one_counts(
    engine: TraceStore, reader: TraceReader, form: str, value: str
) -> None:
    insert(engine, row(1, **events(evaluation(0.5))))
    bad = evaluation() | {conventions.EVALUATION_SCORE: value}
    if form == "event":
        insert(engine, row(2, **events(bad, at=AT + 1)))
    elif form == "record":
        log(engine, record(bad, AT + 1))
    else:
        insert(engine, row(2, conventions.SPAN_ANNOTATION, {conventions.reward_value_key(0): value}, Timestamp=f"{AT + 1:.9f}"))
    last, found = await rewards(reader)
    assert last is None and [name for name, _ in found] == ["correct", "" if form == "emitted" else "correct"]


@pytest.mark.parametrize(
    "attributes",
    [{conventions.reward_value_key(0): "0.25"}, {conventions.reward_name_key(0): "x"}, {conventions.LATE: "true"}],
    ids=["rewarded", "named", "late"],
)
async def test_a_log_record_counts_whatever_its_span_is(engine: TraceStore, reader: TraceReader, attributes: dict[str, str]) -> None:
    insert(engine, row(1, conventions.SPAN_ANNOTATION, attributes), row(2))
    log(engine, record(evaluation(0.875), AT + 6))
    assert (await rewards(reader))[0] == 0.875


async def test_other_reward_attributes_do_not_hide_the_evaluations_of_their_span(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1, "judge", {f"{conventions.REWARD}.note": "x", f"{conventions.REWARD}.note.value": "1"}, **events(evaluation(0.7))))
    assert await rewards(reader) == (0.7, [("correct", 0.7)])


async def test_evaluations_of_one_time_are_in_the_order_of_name_and_value(engine: TraceStore, reader: TraceReader) -> None:
    def same(*given: tuple[float, str]) -> dict[str, Any]:
        return events(*(evaluation(*each) for each in given)) | {"Events.Timestamp": [f"{AT:.9f}"] * len(given)}

    insert(engine, row(2, **same((0.2, "a"))), row(1, **same((0.9, "a"), (0.1, "a"))))
    assert await rewards(reader) == (0.9, [("a", 0.1), ("a", 0.2), ("a", 0.9)])
    log(engine, record(evaluation(0.3, "a")), record(evaluation(0.4, "aa"), SpanId="s2"))
    assert await rewards(reader) == (0.4, [("a", 0.1), ("a", 0.2), ("a", 0.3), ("a", 0.9), ("aa", 0.4)])
    insert(engine, row(3, **same((10.0, "b"), (9.0, "b"), (99.0, "ab"))))
    assert (await rewards(reader))[0] == 10.0
    log(engine, record(evaluation("x", "b") | {conventions.EVALUATION_SCORE: "nan"}))
    assert (await rewards(reader))[0] is None


async def test_evaluations_count_by_time_and_emitted_rewards_by_sequence(engine: TraceStore, reader: TraceReader) -> None:
    def emitted(number: int, reward: float, at: int) -> dict[str, Any]:
        return row(number, conventions.SPAN_ANNOTATION, {conventions.reward_value_key(0): str(reward)}, Timestamp=f"{at:.9f}")

    insert(engine, row(1, **events(evaluation(0.9), at=AT + 10)), row(2, **events(evaluation(0.1), at=AT)))
    assert (await rewards(reader))[0] == 0.9
    insert(engine, emitted(10, 0.3, AT + 20), emitted(11, 0.4, AT + 11))
    assert (await rewards(reader))[0] == 0.4
    insert(engine, row(3, **events(evaluation(0.5), at=AT + 15)))
    assert (await rewards(reader))[0] == 0.5, "not earlier than the last emitted one"


async def test_times_are_compared_by_the_nanosecond(engine: TraceStore, reader: TraceReader) -> None:
    two: dict[str, Any] = events(evaluation(0.1, "a"), evaluation(0.9, "z")) | {"Events.Timestamp": [f"{AT}.000000100", f"{AT}.000000050"]}
    emitted = row(2, conventions.SPAN_ANNOTATION, {conventions.reward_value_key(0): "0.7"}, Timestamp=f"{AT}.000000090")
    insert(engine, row(1, **two), emitted)
    assert await rewards(reader) == (0.1, [("z", 0.9), ("", 0.7), ("a", 0.1)])


async def test_a_reward_that_is_also_an_event_of_its_span_counts_once(engine: TraceStore, reader: TraceReader) -> None:
    own = {conventions.reward_name_key(0): "correct", conventions.reward_value_key(0): "0.5"}
    insert(engine, row(1, conventions.SPAN_ANNOTATION, own, **events(evaluation(0.5))))
    assert await rewards(reader) == (0.5, [("correct", 0.5)])


async def test_a_label_that_stands_for_no_number_is_counted_and_no_reward(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1, **events(evaluation(0.5), evaluation("meh"), evaluation())))
    log(engine, record(evaluation("so-so", "style"), AT + 1), record(evaluation("meh"), AT + 2))
    assert await rewards(reader) == (0.5, [("correct", 0.5)])
    (figures,) = await reader.figures([attempt()])
    assert figures.unread_labels == {"meh": 2, "so-so": 1}
    assert figures.notes == ["evaluations without a score, whose labels are no number: 2 × 'meh', 1 × 'so-so'"]


async def test_labels_that_are_no_number_are_logged_once(engine: TraceStore, reader: TraceReader, caplog: pytest.LogCaptureFixture) -> None:
    label = f"odd-{uuid.uuid4()}"
    insert(engine, row(1, **events(evaluation(label), evaluation(label))))
    for _ in range(2):
        await reader.traces([rollout()], [attempt()])
    (said,) = [each.getMessage() for each in caplog.records if label in each.getMessage()]
    assert "`pass`, `fail`" in said and "docs/otlp.md#evaluations" in said


async def test_an_attempt_of_records_alone_has_their_reward(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1, RolloutId="ro-2", **events(evaluation(0.1))))
    log(engine, record(evaluation(0.2), AT + 1), record(evaluation(0.7, "style"), AT + 2, SpanId=""))
    (figures,) = await reader.figures([attempt()])
    ids = ["ro-1", "ro-2"]
    spans = with_evaluations(await reader.spans(ids), await reader.evaluations(ids), whole=True)
    assert find_final_reward([span for span in spans if span.rollout_id == "ro-1"]) == figures.reward == 0.7
    assert [(span.rollout_id, span.attempt_id, len(span.events)) for span in spans] == [("ro-2", "at-1", 1), ("ro-1", "at-1", 2)]
    part = with_evaluations(await reader.spans(ids), await reader.evaluations(ids), whole=False)
    assert find_final_reward([span for span in part if span.rollout_id == "ro-1"]) is None, "other spans of the attempt may have it"


async def test_evaluations_from_after_the_end_count_and_are_counted(engine: TraceStore, reader: TraceReader) -> None:
    """Judges run after the agent; an agent that goes on logging could pass for one."""
    insert(engine, row(1, **events(evaluation(0.5))))
    log(engine, record(evaluation(0.6), AT + 9), record(evaluation(0.7), AT + 11), record(evaluation(float("nan")), AT + 12))
    ended = attempt().model_copy(update={"end_time": AT + 10.0})
    (figures,) = await reader.figures([ended])
    assert (figures.reward, figures.late_evaluations) == (None, 2)
    assert figures.notes == ["evaluations from after the attempt's end, which count: 2"]
    (running,) = await reader.figures([attempt().model_copy(update={"end_time": None})])
    assert running.late_evaluations == 0


async def test_evaluations_of_spans_that_began_after_the_attempt_do_not_count(engine: TraceStore, reader: TraceReader) -> None:
    insert(engine, row(1, attributes={conventions.LATE: "true"}, **events(evaluation(0.5))))
    (figures,) = await reader.figures([attempt()])
    assert figures.reward is None is (await reader.run_figures(["ro-1"])).to_pylist()[0]["Reward"]
    assert (await reader.traces([rollout()], [attempt()])).rewards == {}


async def test_an_evaluation_is_of_the_call_of_its_span_or_of_its_response(engine: TraceStore, reader: TraceReader) -> None:
    tokens: dict[str, Any] = {"PromptTokenIds": [1], "ResponseTokenIds": [2], "ResponseLogprobs": [-0.5]}

    def answered(number: int) -> dict[str, Any]:
        return call(number, number, attributes={conventions.RESPONSE_ID: f"r{number}"}, **tokens)

    insert(
        engine,
        *map(answered, (1, 3, 4)),
        answered(2) | events(evaluation(0.2)),
        row(5, "chat", {conventions.RESPONSE_ID: "r3"}),
        row(6, conventions.SPAN_ANNOTATION, {conventions.reward_value_key(0): "0.6"}),
        row(7, "agent", **events(evaluation(0.7), at=AT + 1)),
    )
    log(engine, record(evaluation(0.3), SpanId="s5"), record(evaluation(0.1, **{conventions.RESPONSE_ID: "r1"}), SpanId="", TraceId=""))
    done = attempt({"x": 4}).model_copy(update={"status": "succeeded"})
    of = AttemptedRollout.model_validate({**rollout().model_dump(), "status": "succeeded", "attempt": done})
    traces = await reader.traces([of], [done])
    batch = to_transitions(traces)
    own = call_rewards(traces, batch).tolist()
    assert own == pytest.approx([0.1, 0.2, 0.3, 0.6]), "an emitted one by its sequence; the agent's evaluation is of no call"


SCORES: list[tuple[object, object]] = [
    *((None, label) for label in LABELS),
    *((None, label.title()) for label in LABELS),
    *((score, None) for score in (0, 1, -2, 0.1, 1e-300, 12345678901234567890, "0.25", "3", "much", "", True, "nan", "inf",
                               "1_000", " 1", "1\n", "１", "1e1_0", "+.5", "1.", ".", "1e", "Infinity", "-NaN", "nan(1)",
                               "1e400", "0x10", "1\x00")),
    (0.5, "fail"), ("much", "pass"), (True, "false"), (None, "meh"), (None, ""), (None, None),
]  # fmt: skip


@pytest.mark.parametrize("form", ["event", "record"])
async def test_sql_and_python_read_the_same_number_of_each_evaluation(engine: TraceStore, reader: TraceReader, form: str) -> None:
    kinds = (conventions.EVALUATION_SCORE, conventions.EVALUATION_LABEL)
    given = [{key: value for key, value in zip(kinds, score, strict=True) if value is not None} for score in SCORES]
    stored = [{key: json.dumps(value) if not isinstance(value, str) else value for key, value in each.items()} for each in given]
    insert(engine, *(row(number, **(events(each) if form == "event" else {})) for number, each in enumerate(stored)))
    if form == "record":
        log(engine, *(record(each, AT + number, SpanId=f"s{number}") for number, each in enumerate(stored)))
    table = "otel_traces" if form == "event" else "otel_logs"
    found = {str(span): rewards for span, rewards in engine.select(f"SELECT SpanId, Rewards FROM otel.{table}")}
    for number, each in enumerate(given):
        span = SimpleNamespace(name="work", attributes={}, events=[Event(name=conventions.EVALUATION, attributes=each, timestamp=AT)])
        rewards = found[f"s{number}"]
        assert isinstance(rewards, dict)
        expected = [evaluation.value for evaluation in evaluations_of(span)]  # pyright: ignore[reportArgumentType] - a span as far as this is read
        assert np.array_equal([value for _, _, value in dimensions_of(rewards)], expected, equal_nan=True), each
        label = str(each.get(conventions.EVALUATION_LABEL, ""))
        assert unread_of(rewards) == ([label] if label and not expected else [])
