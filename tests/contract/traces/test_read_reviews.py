"""Reviews and mean log-probs, read from both engines."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agl_otel.traces.names import names_in
from agl_otel.traces.opened import TraceStore
from agl_otel.traces.reader import TraceReader
from agl_otel.traces.reviews import read_known_feedback, read_mean_logprobs, read_reviews, read_span_counts
from agl_otel.traces.sql import named_query
from agl_otel.types.reviews import Review
from agl_otel_hook import conventions
from tests.contract.traces.test_evaluations import AT, evaluation, log, record
from tests.contract.traces.test_reader import insert, row


def review(
    source: str, score: float | str | None, at: float, rubric: str = "r@1", *, more: dict[str, str] | None = None, **ids: Any
) -> dict[str, Any]:
    given = {conventions.FEEDBACK_SOURCE: source, conventions.FEEDBACK_RUBRIC: rubric, **(more or {})}
    return record(evaluation(score, "tone", **given), AT + at, **ids)


async def test_of_each_source_the_last_review_is_read_once(engine: TraceStore, reader: TraceReader) -> None:
    last = review("ann", "good", 2)
    log(engine, review("ann", 0.0, 1), last, last, review("ann", 1.0, 1.5, "r@2"), review("bob", "pass", 0))
    log(engine, review("bob", 0.5, 3, RolloutId="ro-2", AttemptId="at-2"))
    found = await read_reviews(reader, limit=10)
    assert [(each.rollout_id, each.source, each.rubric, each.verdict, each.value) for each in found] == [
        ("ro-2", "bob", "r@1", "0.5", 0.5),
        ("ro-1", "ann", "r@1", "good", None),
        ("ro-1", "ann", "r@2", "1", 1.0),
        ("ro-1", "bob", "r@1", "pass", 1.0),
    ], "the latest first"
    assert found[1] == Review("ro-1", "at-1", "ann", "r@1", "tone", "good", None, (AT + 2) * 10**9)
    assert await read_reviews(reader, limit=2) == found[:2]
    assert await read_reviews(reader, limit=9, rollouts=["ro-1", "ro-9"]) == found[1:]
    assert await read_reviews(reader, limit=9, rubric="r@2") == found[2:3]
    assert await read_reviews(reader, limit=9, sources=["bob", "cat"]) == [found[0], found[3]]


@pytest.mark.parametrize(
    "given",
    [
        review("", 1.0, 0),
        review("ann", None, 0, more={conventions.EVALUATION_TEXT: "a comment"}),
        review("ann", 1.0, 0, more={conventions.RESPONSE_ID: "chatcmpl-1"}),
        review("ann", 1.0, 0, RolloutId="", AttemptId=""),
        review("ann", 1.0, 0, EventName="another.event"),
    ],
    ids=["of nobody", "a comment", "of one call", "of no attempt yet", "another event"],
)
async def test_what_is_no_review_of_an_attempt_is_none(given: dict[str, Any], engine: TraceStore, reader: TraceReader) -> None:
    log(engine, given)
    assert await read_reviews(reader, limit=9) == []


async def test_feedback_is_known_by_its_id_and_rollout_also_without_a_reward(engine: TraceStore, reader: TraceReader) -> None:
    one, comment = (review("ann", score, 0, more={conventions.FEEDBACK_ID: name}) for name, score in (("a", 1.0), ("b", None)))
    other = review("ann", 1.0, 0, more={conventions.FEEDBACK_ID: "c"}, RolloutId="ro-2")
    log(engine, one, one, comment, other)
    assert await read_known_feedback(reader, ["ro-1", "ro-9"], ["a", "b", "c", "d"]) == {"a", "b"}
    assert await read_known_feedback(reader, ["ro-2"], ["a", "c"]) == {"c"}
    assert await read_known_feedback(reader, ["ro-1"], []) == set()
    log(engine, *(review("ann", 1.0, at, more={conventions.FEEDBACK_ID: f"d.{at}.x"}) for at in (1, 2)))
    assert await read_known_feedback(reader, ["ro-1"], ["d", "x"]) == {"d.1.x", "d.2.x"}, "the id up to the first dot"


async def test_the_spans_of_an_attempt_are_counted_without_those_of_the_stack(engine: TraceStore, reader: TraceReader) -> None:
    own = row(1)
    ours = (conventions.SPAN_SEAL, conventions.SPAN_ATTEMPT, conventions.SPAN_ANNOTATION)
    insert(engine, own, own, row(2), *(row(3 + place, SpanName=name) for place, name in enumerate(ours)), row(9, RolloutId="ro-2"))
    assert await read_span_counts(reader, ["ro-1", "ro-2", "ro-3"]) == {("ro-1", "at-1"): 2, ("ro-2", "at-1"): 1}


async def test_the_mean_log_prob_is_of_all_tokens_of_an_attempt_each_once(engine: TraceStore, reader: TraceReader) -> None:
    first = row(1, ResponseLogprobs=[-1.0, -2.0, -3.0])
    insert(engine, first, first, row(2, ResponseLogprobs=[-6.0]), row(3))
    insert(engine, *(row(4, RolloutId="ro-2", ResponseLogprobs=given) for given in ([-4.0],)), row(5, RolloutId="ro-3"))
    found = await read_mean_logprobs(reader, ["ro-1", "ro-2", "ro-3"])
    assert list(found.items()) == [(("ro-2", "at-1"), (-4.0, 1)), (("ro-1", "at-1"), (-3.0, 4))], "the lowest first"
    assert all(math.isfinite(mean) for mean, _ in found.values()) and await read_mean_logprobs(reader, ["ro-9"]) == {}


async def test_a_call_of_a_judge_counts_once_by_its_end_or_by_the_most_that_it_may_take(engine: TraceStore, reader: TraceReader) -> None:
    def call(name: str, tokens: int, ended: bool, source: str = "judge:m", rubric: str = "r@1") -> dict[str, Any]:
        names = (conventions.FEEDBACK_SOURCE, conventions.FEEDBACK_RUBRIC, conventions.JUDGE_CALL)
        more = {conventions.JUDGE_PROMPT_TOKENS: str(tokens), conventions.JUDGE_ANSWER_TOKENS: str(2 * tokens)}
        given = {**dict(zip(names, (source, rubric, name), strict=True)), **more, **({conventions.JUDGE_ENDED: "true"} if ended else {})}
        return record(given, AT, EventName=conventions.JUDGE_EVENT, RolloutId="", AttemptId="")

    ended, killed = [call("a", 100, False), call("a", 7, True), call("a", 7, True)], call("b", 100, False)
    log(engine, *ended, killed, call("c", 5, True, source="judge:n"), call("d", 5, True, rubric="r@2"))
    given = {"judge": "judge:m", "rubric": "r@1"}
    (found,) = await reader.query(named_query("judge_spend"), params={**names_in("judge_spend"), **given})
    assert [int(found[name]) for name in ("Calls", "PromptTokens", "AnswerTokens")] == [2, 107, 214]
    (none,) = await reader.query(named_query("judge_spend"), params={**names_in("judge_spend"), **given, "rubric": "r@9"})
    assert [int(none[name]) for name in ("Calls", "PromptTokens", "AnswerTokens")] == [0, 0, 0]
