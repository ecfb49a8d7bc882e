"""Feedback: rewards that come after the fact, for attempts, conversations and model calls; read as training reads them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs

from agl_otel.cli import main
from agl_otel.errors import NotFoundError, UsageError
from agl_otel.spans.rewards import find_final_reward
from agl_otel.store import LightningStore
from agl_otel.types import AttemptedRollout
from agl_otel.types.feedback import Feedback
from agl_otel_hook import conventions
from tests.contract.collector.otlp import attributes, request_of, span
from tests.contract.store.test_spans import span_of


async def test_a_reward_for_an_attempt_that_has_ended_is_its_reward(store: LightningStore, begun: AttemptedRollout) -> None:
    await store.add_span(span_of(begun, sequence=1))
    await store.update_attempt(begun.rollout_id, begun.attempt.attempt_id, status="succeeded")
    given = await store.add_reward(0.25, rollout_id=begun.rollout_id, source="ann", rubric="tone v2", text="too short", id="one")
    assert (given.rollout_id, given.attempt_id, given.is_new) == (begun.rollout_id, begun.attempt.attempt_id, True)
    assert find_final_reward(await store.spans(begun.rollout_id)) == 0.25
    (record,) = await store.reader.evaluations([begun.rollout_id])
    found = record["event"].attributes
    wanted = {conventions.FEEDBACK_ID: "one", conventions.FEEDBACK_SOURCE: "ann", conventions.FEEDBACK_RUBRIC: "tone v2"}
    assert wanted.items() <= found.items() and found[conventions.EVALUATION_TEXT] == "too short"


@pytest.mark.parametrize(
    ("given", "reward"), [({"value": True}, 1.0), ({"label": "Fail"}, 0.0), ({"label": "odd"}, None), ({"text": "why?"}, None)]
)
async def test_a_reward_is_a_number_a_truth_value_or_a_known_label(
    given: dict[str, Any], reward: float | None, store: LightningStore, begun: AttemptedRollout
) -> None:
    await store.add_span(span_of(begun, sequence=1))
    await store.add_reward(rollout_id=begun.rollout_id, attempt_id=begun.attempt.attempt_id, **given)
    assert find_final_reward(await store.spans(begun.rollout_id)) == reward
    (figures,) = await store.reader.figures([begun.attempt])
    assert figures.reward == reward
    assert figures.unread_labels == ({"odd": 1} if given.get("label") == "odd" else {})


async def test_the_last_counts_and_what_is_sent_twice_is_stored_once(store: LightningStore, begun: AttemptedRollout) -> None:
    await store.add_span(span_of(begun, sequence=1))
    now = time.time()
    for value, at, name in ((1.0, now, "a"), (0.5, now - 60, "b"), (1.0, now, "a")):
        given = await store.add_reward(value, rollout_id=begun.rollout_id, time=at, id=name)
    assert given.is_new is False
    assert len(await store.reader.evaluations([begun.rollout_id])) == 2
    again = Feedback(rollout_id=begun.rollout_id, value=1.0, time=now - 120)
    assert [(await store.add_feedback(again)).is_new for _ in range(2)] == [True, False], "an object has one id"
    assert find_final_reward(await store.spans(begun.rollout_id)) == 1.0


async def test_feedback_that_came_as_a_record_is_known_by_its_id(store: LightningStore, begun: AttemptedRollout) -> None:
    values = {"event.name": conventions.EVALUATION, conventions.FEEDBACK_ID: "mine", conventions.EVALUATION_TEXT: "too short"}
    values |= {conventions.ROLLOUT_ID: begun.rollout_id, conventions.ATTEMPT_ID: begun.attempt.attempt_id}
    await _send(store, LogRecord(attributes=attributes(values), time_unix_nano=time.time_ns()))
    assert (await store.add_reward(text="too short", rollout_id=begun.rollout_id, id="mine")).is_new is False


async def test_feedback_on_a_conversation_is_for_the_attempt_that_continued_it_last(store: LightningStore, begun: AttemptedRollout) -> None:
    conversation = f"talk-{begun.rollout_id}"
    with pytest.raises(NotFoundError, match="again later"):
        await store.add_reward(1, conversation_id=conversation)
    await store.add_span(span_of(begun, sequence=1, attributes={conventions.CONVERSATION_ID: conversation}))
    given = await store.add_reward(1, conversation_id=conversation)
    assert (given.rollout_id, given.attempt_id) == (begun.rollout_id, begun.attempt.attempt_id)
    spans = await store.spans(begun.rollout_id)
    assert find_final_reward(spans) == 1.0
    assert [event.is_of_attempt for span in spans for event in span.events] == [True]
    (of_call,) = (await store.reader.outline(begun.rollout_id, limit=10))[0]
    assert of_call.rewards == {}, "it is of the attempt, not of the span that happens to be its first"


async def test_feedback_on_a_conversation_of_no_attempt_yet_is_of_its_trace_and_of_no_span(store: LightningStore) -> None:
    request = request_of([span("turn", {conventions.CONVERSATION_ID: "adopted later"})])
    writer = (await store._open()).writer  # pyright: ignore[reportPrivateUsage]
    await writer.write([request.SerializeToString()])
    given = await store.add_reward(0.5, conversation_id="adopted later", id="of-a-trace")
    assert (given.rollout_id, given.attempt_id) == (None, None)
    what = "hex(unhex(TraceId)) AS Trace, SpanId, RolloutId"
    sql = f"SELECT {what} FROM otel_logs WHERE LogAttributes['{conventions.FEEDBACK_ID}'] = 'of-a-trace'"
    trace_id = request.resource_spans[0].scope_spans[0].spans[0].trace_id.hex().upper()
    assert await store.reader.query(sql) == [{"Trace": trace_id, "SpanId": "", "RolloutId": ""}], (
        "the late pass gives it the trace's attempt"
    )


async def test_feedback_on_a_response_waits_for_the_collector_to_find_its_call(store: LightningStore) -> None:
    given = await store.add_reward(1, response_id="chatcmpl-unknown", id="early")
    assert (given.rollout_id, given.attempt_id, given.is_new) == (None, None, True)
    assert (await store.add_reward(1, response_id="chatcmpl-unknown", id="early")).is_new is False


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"value": 1}, "name one of"),
        ({"value": 1, "rollout_id": "ro-1", "response_id": "x"}, "name one of"),
        ({"value": 1, "attempt_id": "at-1", "response_id": "x"}, "attempt_id needs rollout_id"),
        ({"rollout_id": "ro-1"}, "give a value"),
        ({"value": float("nan"), "rollout_id": "ro-1"}, "at most 1e\\+09"),
        ({"value": 2e9, "rollout_id": "ro-1"}, "at most 1e\\+09"),
        ({"value": 1, "rollout_id": "ro-1", "time": 1.0}, "greater than or equal to 946684800"),
        ({"value": 1, "rollout_id": "ro/1"}, "not allowed"),
        ({"value": 1, "rollout_id": "ro-1", "time": 4e9}, "in the future"),
        ({"value": 1, "rollout_id": "ro-1", "valeu": 1}, "valeu"),
    ],
)
async def test_wrong_feedback_is_refused_by_name(given: dict[str, Any], says: str, store: LightningStore) -> None:
    with pytest.raises(UsageError, match=says):
        await store.add_reward(**given)


async def test_feedback_on_what_does_not_exist_is_refused(store: LightningStore, begun: AttemptedRollout) -> None:
    with pytest.raises(NotFoundError, match="ro-nowhere"):
        await store.add_reward(1, rollout_id="ro-nowhere")
    with pytest.raises(NotFoundError, match="no attempt at-nowhere"):
        await store.add_reward(1, rollout_id=begun.rollout_id, attempt_id="at-nowhere")


@pytest.fixture
def command(store: LightningStore, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    def run(*arguments: str) -> tuple[str, str]:
        """Return what `agl-otel feedback` prints on both streams."""
        with pytest.raises(SystemExit):
            main(["feedback", "--store", store._source.address(), *arguments])  # pyright: ignore[reportPrivateUsage]
        return capsys.readouterr()

    return run


def test_the_command_gives_feedback_on_a_part_of_an_id_and_from_a_file(
    store: LightningStore, begun: AttemptedRollout, command: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    attempt = begun.attempt.attempt_id
    out, _ = command(begun.rollout_id[-20:], "0.5", "--source", "ann", "--id", "first")
    assert out == f"first is stored for attempt {attempt} of {begun.rollout_id}\n"
    assert command(begun.rollout_id, "0.5", "--id", "first")[0] == "first was stored before\n"
    assert "half a minute" in command("--response", "chatcmpl-none", "true")[0]
    lines = tmp_path / "given.jsonl"
    given = [{"rollout_id": begun.rollout_id, "value": 0.5 + number / 10, "id": f"line-{number}"} for number in range(3)]
    lines.write_text("\n".join(map(json.dumps, given)) + "\n\n")
    assert command("--from", str(lines))[0] == "3 stored\n"
    lines.write_text(json.dumps(given[0]) + '\n{"value": 1}\n')
    assert "line 2 is wrong: name one of" in command("--from", str(lines))[1]
    lines.write_text("\n".join(map(json.dumps, [{**given[0], "id": "line-3"}, {**given[1], "rollout_id": "ro-nowhere"}, given[2]])))
    said = command("--from", str(lines))[1]
    assert "line 2: " in said and "ro-nowhere" in said and "1 line before it is stored: correct it, and send the lines from it on" in said
    assert f"for attempt {attempt} of" in command(begun.rollout_id, "-0.5", "--id", "below", "--text", "-1")[0]
    assert command("--id", "below", "--", begun.rollout_id, "-0.5") == ("below was stored before\n", "")

    async def stored() -> list[dict[str, Any]]:
        return await (await store.open()).reader.evaluations([begun.rollout_id])

    found = asyncio.run(stored())
    named = [record["event"].attributes[conventions.FEEDBACK_ID] for record in found]
    assert named == ["first", *(f"line-{number}" for number in range(4)), "below"]
    assert found[-1]["event"].attributes[conventions.EVALUATION_SCORE] == -0.5


@pytest.fixture
async def rated(store: LightningStore, begun: AttemptedRollout) -> AttemptedRollout:
    """A rollout with feedback on its attempt, and on a call of it."""
    await store.add_span(span_of(begun, sequence=1, attributes={conventions.RESPONSE_ID: "r1"}))
    await store.add_reward(0.5, rollout_id=begun.rollout_id, source="ann", rubric="tone@2", text="too short", correction="Try again.")
    values = {conventions.EVALUATION_NAME: "judge", conventions.EVALUATION_LABEL: "pass", conventions.RESPONSE_ID: "r1"}
    values |= {conventions.ROLLOUT_ID: begun.rollout_id, conventions.ATTEMPT_ID: begun.attempt.attempt_id}
    await _send(store, LogRecord(event_name=conventions.EVALUATION, attributes=attributes(values), time_unix_nano=time.time_ns()))
    return begun


async def _send(store: LightningStore, record: LogRecord) -> None:
    """Send a record as an evaluator does."""
    request = ExportLogsServiceRequest(resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=[record])])])
    await (await store._open()).writer.write_logs(request.SerializeToString())  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("command_of", "about"), [("traces", ""), ("rollouts", "  on call r1")])
def test_what_feedback_says_is_shown(
    command_of: str, about: str, store: LightningStore, rated: AttemptedRollout, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*more: str) -> str:
        with pytest.raises(SystemExit):
            main([command_of, "show", rated.rollout_id, *more, "--store", store._source.address()])  # pyright: ignore[reportPrivateUsage]
        return capsys.readouterr().out

    lines = shown().splitlines()
    assert '  feedback = 0.5 by ann (tone@2): "too short"; should have been "Try again."' in lines
    (of_call,) = [line for line in lines if "judge" in line]
    assert of_call.endswith(f"judge = 1 (pass){about}")
    given = {each["name"]: each for each in json.loads(shown("--json"))["feedback"]}
    assert (given["feedback"]["text"], given["feedback"]["correction"], given["feedback"]["source"]) == ("too short", "Try again.", "ann")
    assert (given["judge"]["response_id"], given["judge"]["value"], given["feedback"]["span_id"]) == ("r1", 1.0, "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ro-nowhere", "1"], "ro-nowhere"),
        (["ro-1", "good"], "--label"),
        (["ro-1", "1", "2"], "more than one value"),
        ([], "name one of"),
        (["--from", "-", "--text", "x"], "leave out the rest"),
    ],
)
def test_the_command_refuses_what_is_unclear(arguments: list[str], says: str, command: Callable[..., tuple[str, str]]) -> None:
    assert says in command(*arguments)[1]
