"""Function agents with a real queue and an OTLP receiver: rewards, failures, and reports to the queue."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

import agl_otel as agl
from agl_otel.runner.agents import FunctionAgent
from agl_otel.types import LLM, ProxyLLM, Span
from agl_otel_hook import conventions
from tests.contract.runner.conftest import Stack

MODEL = LLM(endpoint="http://vllm.example/v1", model="m", api_key="sk-secret")


def primary(stack: Stack, rollout: Any) -> list[Any]:
    return [span.attributes[conventions.reward_value_key(0)] for span in stack.spans(rollout, conventions.SPAN_ANNOTATION)]


def sync_agent(question: str, llm: LLM) -> float:
    with trace.get_tracer("agent").start_as_current_span("think"):
        return float(len(question) + ("/rollout/ro-" in llm.endpoint) + (llm.api_key == "sk-secret") * 100)


async def async_agent(question: str, llm: LLM) -> float:
    await asyncio.sleep(0)
    return sync_agent(question, llm)


@pytest.mark.parametrize("function", [sync_agent, async_agent])
async def test_a_number_becomes_a_reward_under_the_attempts_root_span(stack: Stack, function: Any) -> None:
    rollouts = await stack.enqueue({"question": "abc"}, {"question": "abcd"}, resources={"main": MODEL})
    counts = await stack.run(FunctionAgent(function), max_rollouts=2)
    assert counts["succeeded"] == 2
    attempts = await stack.finished(*rollouts)
    assert [attempt.status for attempt in attempts] == ["succeeded", "succeeded"]
    for rollout, attempt, expected in zip(rollouts, attempts, (4.0, 5.0), strict=True):
        assert primary(stack, rollout) == [expected]
        [root] = stack.spans(rollout, conventions.SPAN_ATTEMPT)
        assert root.marker is None
        children = [*stack.spans(rollout, "think"), *stack.spans(rollout, conventions.SPAN_ANNOTATION)]
        assert {(span.trace_id, span.parent_id, span.key[1]) for span in children} == {(root.trace_id, root.span_id, attempt.attempt_id)}
        assert attempt.seals == {children[0].marker: 2, "proxy-marker": 2}


@pytest.mark.parametrize("kind", [LLM, ProxyLLM])
async def test_a_function_behind_a_proxy_gets_no_providers_secret(stack: Stack, kind: type[LLM] | type[ProxyLLM]) -> None:
    given: dict[str, Any] = {"api_key": "hunter2", "sampling_parameters": {"extra_headers": {"X-Api-Key": "hunter2"}, "top_p": 0.5}}
    secret = kind(endpoint="http://u:hunter2@vllm.example/v1", model="m", **given)
    told: list[str] = []
    await stack.enqueue("t", resources={"main": secret, "judge": secret})
    await stack.run(FunctionAgent(lambda llm, resources, rollout: told.append(repr((llm, resources, rollout)))), max_rollouts=1)
    assert "hunter2" not in told[0] and told[0].count("top_p") == 3


async def test_the_root_span_is_acked_before_the_agent_starts(stack: Stack) -> None:
    [rollout] = await stack.enqueue("t")
    seen: list[int] = []
    await stack.run(FunctionAgent(lambda task: seen.append(len(stack.spans(rollout, conventions.SPAN_ATTEMPT)))), max_rollouts=1)
    assert seen == [1]


async def test_agents_that_seed_random_get_distinct_trace_ids(stack: Stack) -> None:
    def agent(task: str) -> float:
        random.seed(0)
        with trace.get_tracer("agent").start_as_current_span("think"):
            return float(random.getrandbits(1))

    rollouts = await stack.enqueue(*"abcd")
    await stack.run(FunctionAgent(agent), max_rollouts=4)
    spans = [span for rollout in rollouts for span in stack.spans(rollout, "think")]
    assert len({span.trace_id for span in spans}) == len({span.span_id for span in spans}) == 4


async def test_the_last_attempts_of_max_rollouts_may_exceed_the_grace_period(stack: Stack) -> None:
    async def agent(task: str) -> float:
        await asyncio.sleep(0.2)
        assert stack.runner is not None
        stack.runner._grace_seconds = 60.0  # pyright: ignore[reportPrivateUsage] - for their results, which have the same time
        return 1.0

    rollouts = await stack.enqueue("a", "b")
    counts = await stack.run(FunctionAgent(agent), max_rollouts=2, grace_seconds=0.01)
    assert counts["succeeded"] == 2
    assert [attempt.status for attempt in await stack.finished(*rollouts)] == ["succeeded", "succeeded"]


async def test_an_answer_is_graded_and_reward_dimensions_keep_their_order(stack: Stack) -> None:
    def grade(task: str, answer: str) -> dict[str, float]:
        return {"right": float(answer == task.upper()), "length": len(answer)}

    [rollout] = await stack.enqueue("abc")
    await stack.run(FunctionAgent(lambda task: task.upper(), grader=grade), max_rollouts=1)
    [span] = stack.spans(rollout, conventions.SPAN_ANNOTATION)
    found = [(span.attributes[conventions.reward_name_key(i)], span.attributes[conventions.reward_value_key(i)]) for i in range(2)]
    assert found == [("right", 1.0), ("length", 3.0)]
    evaluations = [(name, *attributes.values()) for name, attributes in span.events]
    assert evaluations == [(conventions.EVALUATION, *each) for each in found], "for other tools"


@pytest.mark.parametrize(
    ("value", "rewards"),
    [(np.float32(0.5), [0.5]), (np.bool_(True), [1.0]), ({"right": np.float32(0.5), "length": np.int64(3)}, [0.5]), (None, [])],
)
async def test_scalars_of_numpy_are_rewards_by_agents_and_graders(stack: Stack, value: Any, rewards: list[float]) -> None:
    rollouts = await stack.enqueue("a", "b")

    async def grade(task: str, answer: str) -> Any:
        return value

    await stack.run(FunctionAgent(lambda task: value), max_rollouts=1)
    await stack.run(FunctionAgent(lambda task: "x", grader=grade), max_rollouts=1)
    assert [attempt.error for attempt in await stack.finished(*rollouts)] == [None, None]
    assert [primary(stack, rollout) for rollout in rollouts] == [rewards, rewards]


async def test_a_grader_gets_the_task_as_it_was_enqueued_whatever_the_agent_did_to_it(stack: Stack) -> None:
    def agent(task: Any, rollout: Any) -> str:
        rollout.input["gold"] = "mine"
        return task.pop("gold")

    [rollout] = await stack.enqueue({"gold": 4})
    await stack.run(FunctionAgent(agent, grader=lambda task, answer: float(task == {"gold": 4} and answer == "mine")), max_rollouts=1)
    assert primary(stack, rollout) == [1.0]


def raises(task: Any) -> None:
    raise ValueError(f"cannot do {task}")


def bad_grader(task: Any, answer: Any) -> float:
    raise KeyError("gold")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (FunctionAgent(raises), "raises raised ValueError: cannot do t"),
        (FunctionAgent(lambda task: object()), "returned a object"),
        (FunctionAgent(lambda task: "good"), "returned a str: return a number, None or spans of one kind, or name a grader"),
        (FunctionAgent(lambda task: [1.0, "x"]), "returned a list of float, str: return a number, None or spans of one kind"),
        (FunctionAgent(lambda task: [Span.from_attributes(attributes={}, span_id="0" * 16)]), "span id '0000000000000000'"),
        (FunctionAgent(lambda task: float("nan")), "a reward must be finite"),
        (FunctionAgent(lambda task: "x", grader=bad_grader), "grader bad_grader raised KeyError: 'gold'"),
        (FunctionAgent(lambda task: "x", grader=lambda task, answer: "good"), "'good' is not a reward"),  # type: ignore[arg-type,return-value]  # pyright: ignore[reportArgumentType]  # the mistake under test
        (FunctionAgent(lambda a, b: None), "takes a, b, which nothing fills"),
    ],
)  # fmt: skip
async def test_errors_fail_the_attempt_with_a_message_and_without_a_reward(stack: Stack, agent: FunctionAgent, message: str) -> None:
    [rollout] = await stack.enqueue("t")
    counts = await stack.run(agent, max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert (attempt.status, counts["failed"]) == ("failed", 1)
    assert attempt.error is not None
    assert message in attempt.error
    assert primary(stack, rollout) == []


def read_elsewhere(task: str) -> Any:
    """Spans of every kind that 0.3 took, each with a child and a reward."""
    if task == "none":
        return []
    reward = {conventions.reward_name_key(0): "primary", conventions.reward_value_key(0): 0.5}
    if task == "fields":
        return [agl.SpanCoreFields(name=name, attributes=held) for name, held in (("root", {}), (conventions.SPAN_ANNOTATION, reward))]
    if task == "models":
        root = Span.from_attributes(name="root", attributes={"n": 1}, start_time=1.7e9, end_time=1.7e9 + 1)
        return [
            root,
            Span.from_attributes(name=conventions.SPAN_ANNOTATION, attributes=reward, trace_id=root.trace_id, parent_id=root.span_id),
        ]
    tracer = trace.get_tracer("x") if task == "own" else TracerProvider().get_tracer("elsewhere")
    with tracer.start_as_current_span("root", attributes={"n": 1}) as root:
        child = tracer.start_span(conventions.SPAN_ANNOTATION, attributes=reward)
        child.end()
    return [root, child, child]


@pytest.mark.parametrize("kind", ["sdk", "own", "models", "fields"])
async def test_spans_that_something_else_has_recorded_are_counted_and_stored_once(stack: Stack, kind: str) -> None:
    stack.proxy.spans = 0
    [rollout] = await stack.enqueue(kind)
    await stack.run(FunctionAgent(read_elsewhere), max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert (attempt.status, attempt.error) == ("succeeded", None)
    [root], [child] = stack.spans(rollout, "root"), stack.spans(rollout, conventions.SPAN_ANNOTATION)
    assert root.key == child.key == (rollout.rollout_id, attempt.attempt_id) and root.marker == child.marker
    [attempt_span] = stack.spans(rollout, conventions.SPAN_ATTEMPT)
    parents = {"sdk": root, "own": root, "models": root, "fields": attempt_span}
    assert (child.trace_id, child.parent_id) == (parents[kind].trace_id, parents[kind].span_id)
    assert primary(stack, rollout) == [0.5] and stack.events[-1].reward == 0.5
    verdict = stack.verdict(attempt)
    assert (verdict.kind, verdict.reasons, verdict.notes) == ("complete", [], [])


async def test_no_spans_are_as_none(stack: Stack) -> None:
    [rollout] = await stack.enqueue("none")
    await stack.run(FunctionAgent(read_elsewhere), max_rollouts=1)
    assert [attempt.status for attempt in await stack.finished(rollout)] == ["succeeded"]


async def test_none_succeeds_without_a_reward(stack: Stack) -> None:
    [rollout] = await stack.enqueue("t")
    await stack.run(FunctionAgent(lambda task: None), max_rollouts=1)
    assert [attempt.status for attempt in await stack.finished(rollout)] == ["succeeded"]
    assert primary(stack, rollout) == []


async def test_agents_run_concurrently_up_to_the_limit(stack: Stack) -> None:
    running, most, all_in = 0, 0, asyncio.Event()

    async def agent(task: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            all_in.set()
        await all_in.wait()
        running -= 1

    await stack.enqueue(*range(6))
    await stack.run(FunctionAgent(agent), max_rollouts=6, concurrency=3)
    assert most == 3


async def test_cancelling_a_rollout_ends_its_async_agent_and_reports_nothing(stack: Stack) -> None:
    from agl_otel.queue.client import RolloutUpdate

    began, ended = asyncio.Event(), asyncio.Event()

    async def agent(task: str) -> float:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return 1.0

    [rollout] = await stack.enqueue("t")
    async with stack.running(FunctionAgent(agent)):
        await began.wait()
        await stack.queue.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])
        async with asyncio.timeout(300):
            await ended.wait()
        await stack.until(lambda: stack.events and stack.events[-1].outcome == "cancelled")
    [found] = await stack.queue.query_rollouts(rollout_id_in=[rollout.rollout_id])
    assert found.status == "cancelled"
    assert primary(stack, rollout) == []


async def test_a_sync_function_past_its_time_limit_is_abandoned_and_frees_its_slot(stack: Stack) -> None:
    go_on = threading.Event()

    def agent(task: str) -> float:
        if task == "hangs":
            go_on.wait(300)
        return 1.0

    [hangs] = await stack.enqueue("hangs", timeout_seconds=0.3)
    [runs] = await stack.enqueue("runs")
    try:
        counts = await stack.run(FunctionAgent(agent), max_rollouts=2, concurrency=1)
    finally:
        go_on.set()
    assert (counts["timeout"] + counts["fenced"] + counts["cancelled"], counts["succeeded"]) == (1, 1)
    assert [attempt.status for attempt in await stack.finished(hangs, runs)] == ["timeout", "succeeded"]
    assert primary(stack, hangs) == []


async def test_a_grader_past_the_time_limit_or_the_runners_end_is_named(stack: Stack) -> None:
    """A judge that does not answer is not mistaken for a slow agent."""
    go_on, began = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def judge(task: str, answer: str) -> float:
        loop.call_soon_threadsafe(began.set)
        go_on.wait(300)
        return 1.0

    agent = FunctionAgent(lambda task: "answer", grader=judge)
    rollouts = await stack.enqueue("t", "t")
    name = f"grader {judge.__qualname__}"
    try:
        await stack.run(agent, max_rollouts=1, timeout_seconds=0.3)
        began.clear()
        async with stack.running(agent, grace_seconds=0.1):
            await began.wait()
    finally:
        go_on.set()
    late, stopped = await stack.finished(*rollouts)
    assert (late.status, late.error) == ("timeout", f"{name} ran past the attempt's 0.3 s")
    assert (stopped.status, stopped.error) == ("failed", f"the runner was stopped before {name} had ended")
    assert [primary(stack, rollout) for rollout in rollouts] == [[], []]


async def test_spans_that_a_function_left_open_are_recorded_as_abandoned(stack: Stack) -> None:
    stack.proxy.spans = 0
    kept: list[trace.Span] = []

    def agent(task: str) -> float:
        stack.telemetry.tracer("agent").start_span("work").end()
        if task == "leaks":
            kept.append(stack.telemetry.tracer("agent").start_span("stream"))
        return 1.0

    rollouts = await stack.enqueue("leaks", "closes")
    await stack.run(FunctionAgent(agent), max_rollouts=2)
    for attempt, abandoned in zip(await stack.finished(*rollouts), (1, 0), strict=True):
        assert attempt.ledger is not None and attempt.ledger.over is not None
        (process,) = attempt.ledger.processes
        assert (process.pid, process.runner, process.closed) == (os.getpid(), True, True)
        assert (process.begun, process.ended, process.abandoned) == (2 + abandoned, 2, abandoned)
        verdict = stack.verdict(attempt)
        assert (verdict.kind, len(verdict.notes)) == ("complete", abandoned)


async def test_attempts_that_end_together_share_calls(stack: Stack) -> None:
    rollouts = await stack.enqueue(*range(64))
    exports = stack.receiver.exports
    await stack.run(FunctionAgent(lambda task: 1.0), max_rollouts=64, concurrency=64)
    assert sorted(key for batch in stack.proxy.closed for key in batch) == sorted(
        (attempt.rollout_id, attempt.attempt_id) for attempt in await stack.finished(*rollouts)
    )
    assert len(stack.proxy.closed) < 32
    assert stack.receiver.exports - exports < 96


async def test_a_short_proxy_outage_loses_nothing(stack: Stack) -> None:
    stack.proxy.fail = 2
    [rollout] = await stack.enqueue("t")
    counts = await stack.run(FunctionAgent(lambda task: 1.0), max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert (counts["close_errors"], attempt.status) == (0, "succeeded")
    assert (attempt.seals or {})["proxy-marker"] == 2


async def test_a_missing_proxy_is_counted_and_the_attempt_completes(stack: Stack) -> None:
    stack.proxy.fail = 1000
    [rollout] = await stack.enqueue("t")
    counts = await stack.run(FunctionAgent(lambda task: 1.0), max_rollouts=1)
    [attempt] = await stack.finished(rollout)
    assert (counts["close_errors"], attempt.status) == (1, "succeeded")
    assert "proxy-marker" not in (attempt.seals or {})
