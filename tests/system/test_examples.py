"""The examples whose agents are built on frameworks, as their users run them, small: agents unmodified, models scripted."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from agl_otel import semconv
from agl_otel.adapters import TracerTraceToTriplet, to_trajectories
from agl_otel.trainer import Job
from tests.matrix.model import ScriptedModel
from tests.matrix.script import Message, Request, calling
from tests.system.examples import EXAMPLES, Stage, asks_for, assert_whole, python_of, rewards, stage

pytestmark = [pytest.mark.system, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with stage(tmp_path_factory.mktemp("stack")) as running:
        yield running


# --- calc_x


def calculates(request: Request, call_id: str) -> Message:
    """Has the calculator multiply the first two numbers and then add the third, which is right for one story of three."""
    numbers = [int(number) for number in re.findall(r"\d+", request.messages[1].text)]
    results = [message.text for message in request.messages if message.role == "tool"]
    if len(results) == 2:
        return Message("assistant", f"I have asked twice.\nAnswer: {results[-1]}")
    expression = f"{results[0]} + {numbers[2]}" if results else f"{numbers[0]} * {numbers[1]}"
    return calling("calculate", {"expression": expression}, call_id)


async def test_calc_x_asks_its_calculator_over_mcp_and_is_graded_by_the_result(on: Stage) -> None:
    assert asks_for("calc_x", "openai_agents")
    folder = EXAMPLES / "calc_x"
    job = Job.load(folder / "job.toml")
    tasks = job.tasks("train")
    right = next(task for task in tasks if task["question"].startswith("Tom has"))
    wrong = next(task for task in tasks if "friends" in task["question"])
    python, command = python_of("openai_agents"), job.agent.command or []
    async with ScriptedModel(calculates) as model:
        traces = await on.play(folder, [python, *command[1:]], [right, wrong], model, grader=str(job.agent.grader))
        assert_whole(traces, model, calls=6)
    assert list(rewards(traces).values()) == [1.0, 0.0]
    spans = await on.store.spans([rollout.rollout_id for rollout in traces.rollouts])
    assert sum(span.name.startswith("calculate") for span in spans) == 4, sorted({span.name for span in spans})


# --- spider

RIGHT = "SELECT name FROM singer WHERE country = 'France'"


def writes_sql(request: Request, call_id: str) -> Message:
    """Writes a query with a fault in it, finds it when checking, and mends it; is content with its query for flights, which is wrong."""
    system, text = request.messages[0].text, request.messages[-1].text
    if "flights" in text:
        return Message("assistant", "All is well. THE QUERY IS CORRECT." if "You check" in system else "SELECT 4711")
    if "You check" in system:
        return Message("assistant", "There is no such column." if "error:" in text else "THE QUERY IS CORRECT.")
    return Message("assistant", f"```sql\n{RIGHT}\n```" if "anew" in system else "SELECT nome FROM singer")


async def test_spider_writes_checks_and_rewrites_and_only_the_writers_are_trained(on: Stage) -> None:
    assert asks_for("spider", "langgraph")
    folder = EXAMPLES / "spider"
    job = Job.load(folder / "job.toml")
    [french] = [task for task in job.tasks("train") if task["query"] == RIGHT]
    [flights] = [task for task in job.tasks("train") if task["question"] == "How many flights are there?"]
    python, command = python_of("langgraph"), job.agent.command or []
    async with ScriptedModel(writes_sql) as model:
        traces = await on.play(folder, [python, *command[1:]], [french, flights], model, grader=str(job.agent.grader))
        assert_whole(traces, model, calls=6)
    assert list(rewards(traces).values()) == [1.0, 0.0]
    # In the traces of real LangGraph nodes, as columns and as a tree of spans, each call has its node's name.
    mended, flights_rollout = (rollout.rollout_id for rollout in traces.rollouts)
    agents = list(zip(traces.calls.rollout_id, traces.calls.agent, strict=True))
    assert [agent for rollout, agent in agents if rollout == mended] == ["write", "check", "rewrite", "check"]
    assert [agent for rollout, agent in agents if rollout == flights_rollout] == ["write", "check"]
    assert job.algorithm["agent_match"] == "write"
    assert sorted(to_trajectories(traces, agent_match="write").agent) == ["rewrite", "write", "write"]
    spans = [span for span in await on.store.spans([mended]) if span.name != semconv.SPAN_LLM]
    found = TracerTraceToTriplet(agent_match="write|check", llm_call_match="ChatOpenAI")(spans)
    assert [triplet.metadata["agent_name"] for triplet in found] == ["write", "check", "rewrite", "check"]
