"""The examples whose agents are built on frameworks, run small as users run them: unmodified agents, scripted models."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from agl_otel.adapters import TracerTraceToTriplet, to_trajectories
from agl_otel.algorithms.grpo.policy import load_policy
from agl_otel.algorithms.grpo.tiny import make_policy
from agl_otel.jobs.job import Job
from agl_otel.settings import free_port
from agl_otel_hook import conventions
from tests.matrix.model import ScriptedModel
from tests.matrix.script import Message, Request, calling
from tests.system.examples import EXAMPLES, Stage, asks_for, assert_whole, finished, python_of, rewards, serving, stage

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with stage(tmp_path_factory.mktemp("stack")) as running:
        yield running


# --- calc_x


def calculates(request: Request, call_id: str) -> Message:
    """Call the calculator to multiply the first two numbers and then add the third, which is right for one story of three."""
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
    """Write a query with an error, find it when checking, and correct it; accept the wrong query for flights."""
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
    # In the traces of real LangGraph nodes, each call has its node's name, both as columns and in the tree of spans.
    mended, flights_rollout = (rollout.rollout_id for rollout in traces.rollouts)
    agents = list(zip(traces.calls.rollout_id, traces.calls.agent, strict=True))
    assert [agent for rollout, agent in agents if rollout == mended] == ["write", "check", "rewrite", "check"]
    assert [agent for rollout, agent in agents if rollout == flights_rollout] == ["write", "check"]
    assert job.algorithm["agent_match"] == "write"
    assert sorted(to_trajectories(traces, agent_match="write").agent) == ["rewrite", "write", "write"]
    spans = [span for span in await on.store.spans([mended]) if span.name != conventions.SPAN_LLM]
    found = TracerTraceToTriplet(agent_match="write|check", llm_call_match="ChatOpenAI")(spans)
    assert [triplet.metadata["agent_name"] for triplet in found] == ["write", "check", "rewrite", "check"]


# --- minimal


async def script(name: str, *arguments: str) -> str:
    """Run a script of examples/minimal."""
    return await finished(sys.executable, EXAMPLES / "minimal" / name, *arguments)


async def test_minimal_spans_written_by_hand_make_a_complete_rollout(on: Stage) -> None:
    lines = (await script("write_traces.py", "--store", on.address)).splitlines()
    names = {line.split()[-1] for line in lines[:-2]}
    assert names == {conventions.SPAN_OPERATION, conventions.SPAN_MESSAGE, conventions.SPAN_ANNOTATION, "think"}
    assert lines[-2] == "reward 1.0" and lines[-1].endswith("succeeded, verdict complete"), lines


async def test_minimal_metrics_of_both_kinds_are_read_back(on: Stage) -> None:
    assert await script("write_metrics.py", "--store", on.address) == "agl.training.reward_mean 1\nexample.answers 5\n"


async def test_minimal_models_answer_by_name_and_are_recorded_within_a_rollout(on: Stage) -> None:
    def says(request: Request, call_id: str) -> Message:
        return Message("assistant", f"You asked: {request.messages[-1].text}")

    async with ScriptedModel(says) as model:
        lines = (await script("llm_proxy.py", model.url, "m", "--store", on.address)).splitlines()
        prompt, response = (len(ids) for ids in (model.served[-1].sampled.prompt_ids, model.served[-1].sampled.response_ids))
    assert lines == [
        "of no rollout: You asked: What is a proxy?",
        "of a rollout: You asked: What is a rollout?",
        f"1 call: {prompt} tokens in, {response} out, {response} log-probs",
    ]


async def test_minimal_vllm_answers_with_token_ids(tmp_path: Path) -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: it needs gigabytes, and a GPU for any speed")
    make_policy(tmp_path)
    prompt = load_policy(tmp_path).prompt_ids([{"role": "user", "content": "Say hello."}])
    assert f"prompt {prompt}" in await script("vllm_server.py", str(tmp_path))


async def test_minimal_vllm_reports_a_missing_vllm() -> None:
    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed")
    with pytest.raises(AssertionError, match="pip install vllm"):
        await script("vllm_server.py", "m")


# --- search_r1 and rag


def river(request: Request, call_id: str) -> Message:
    """Look up the town and then its river, and answer the river whatever the question."""
    told = [message.text for message in request.messages if message.text.startswith("<information>")]
    painter = re.findall(r"([A-Z]\w+ [A-Z]\w+) (?:was )?born", request.messages[0].text)[-1]
    if not told:
        return Message("assistant", f"<think>I look up the town.</think>\n<search>where {painter} was born</search>")
    town = re.findall(rf"{painter} is a painter who was born in (\w+)", told[0])[0]
    if len(told) == 1:
        return Message("assistant", f"<think>Now its river.</think>\n<search>{town} is on the river</search>")
    found = re.findall(rf"{town} is a town on the river (\w+)", told[1])[0]
    return Message("assistant", f"<think>There it is.</think>\n<answer>The {found}.</answer>")


async def test_search_r1_looks_up_twice_and_retrieved_text_has_no_loss(on: Stage) -> None:
    folder = EXAMPLES / "search_r1"
    job = Job.load(folder / "job.toml")
    town, river_of = job.tasks("train")[:2]
    command = job.agent.command or []
    async with ScriptedModel(river) as model, serving(sys.executable, folder / "retriever.py", "--port", "0") as retriever:
        traces = await on.play(
            folder, [sys.executable, *command[1:]], [river_of, town], model, grader=str(job.agent.grader), env={"RETRIEVER_URL": retriever}
        )
        assert_whole(traces, model, calls=6)
    assert list(rewards(traces).values()) == [1.0, 0.0]
    batch = to_trajectories(traces)
    assert (len(batch), sum(batch.breaks.values())) == (2, 0)
    for response, mask in zip(batch.response, batch.response_mask, strict=True):
        told = "".join(chr(token - 16) for token in response[mask == 0].tolist() if token >= 16)
        written = "".join(chr(token - 16) for token in response[mask == 1].tolist() if token >= 16)
        assert "<information>" in told and "<search>" in written and "<information>" not in written and "<search>" not in told


def librarian(request: Request, call_id: str) -> Message:
    """Retrieve with the question, and answer the passage's number, or the whole passage if it has none."""
    told = [message.text for message in request.messages if message.role == "tool"]
    if not told:
        return calling("retrieve", {"query": request.messages[-1].text}, call_id)
    passage = told[0].splitlines()[0]
    return Message("assistant", next(iter(re.findall(r"\d+(?=\.$| days off)", passage)), passage))


async def test_rag_retrieves_over_mcp_and_long_answers_get_less(on: Stage) -> None:
    assert asks_for("rag", "openai_agents")
    folder, python = EXAMPLES / "rag", python_of("openai_agents")
    job = Job.load(folder / "job.toml")
    short, _, long, *_ = job.tasks("train")
    command, port = job.agent.command or [], free_port()
    async with ScriptedModel(librarian) as model, serving(python, folder / "retriever.py", "--port", str(port), at=port):
        url = f"http://127.0.0.1:{port}/mcp"
        traces = await on.play(
            folder, [python, *command[1:]], [short, long], model, grader=str(job.agent.grader), env={"RETRIEVER_URL": url}
        )
        assert_whole(traces, model, calls=4)
    assert list(rewards(traces).values()) == [1.0, 2 * 2 / (2 + 16)]


# --- claude_code


def edits(request: Request, call_id: str) -> Message:
    """Read the file, edit it (correctly in one repository, wrongly in the other), and finish."""
    folder = re.search(r"The repository is in (\S+?)\. Resolve", " ".join(message.text for message in request.messages))
    if "Edit" not in request.tools or folder is None:
        return Message("assistant", "Nothing to do here.")
    shop = any("shop.py" in message.text for message in request.messages if message.role == "user")
    path = f"{folder[1]}/{'shop' if shop else 'names'}.py"
    done = sum(message.role == "tool" for message in request.messages)
    if done == 0:
        return calling("Read", {"file_path": path}, call_id)
    if done == 1:
        old, new = ("sum(price for", "sum(price * count for") if shop else ("part[0]", "part[1]")
        return calling("Edit", {"file_path": path, "old_string": old, "new_string": new}, call_id)
    return Message("assistant", "I have edited the file.")


@pytest.mark.parametrize("claude", [False, True], ids=["stand-in", "claude"])
async def test_claude_code_edits_repositories_and_leaves_spans_a_data_set_and_a_report(on: Stage, tmp_path: Path, claude: bool) -> None:
    found = shutil.which("claude")
    if claude and found is None:
        pytest.skip("the claude command is not installed (npm install --global @anthropic-ai/claude-code, 360 MB)")
    assert asks_for("claude_code", "anthropic")
    folder, python = EXAMPLES / "claude_code", python_of("anthropic")
    path = os.environ["PATH"].split(os.pathsep)
    hidden = os.pathsep.join(part for part in path if claude or not (Path(part) / "claude").exists())
    arguments = ("--store", on.address, "--out", str(tmp_path / "out"))
    async with (
        ScriptedModel(edits) as model,
        on.runner(
            folder, "--grader", "grade.py:grade", "--", python, "agent.py", "{instance}", env={"PATH": hidden, "HOME": str(tmp_path)}
        ),
    ):
        await finished(sys.executable, folder / "collect.py", model.url, "local", *arguments, cwd=folder)
        assert {body["model"] for body in model.asked} == {"local"}
        report = json.loads((tmp_path / "out" / "report.json").read_text())
        assert (report["resolved"], report["unresolved"], report["failed"]) == (["shop__total-1"], ["names__initials-2"], [])
        rows = [json.loads(line) for line in (tmp_path / "out" / "dataset.jsonl").read_text().splitlines()]
        traces = await on.store.traces(list(dict.fromkeys(row["rollout_id"] for row in rows)))
        assert_whole(traces, model)
    assert sorted({row["reward"] for row in rows}) == [0.0, 1.0]
    for row in rows:
        assert len(row["response_ids"]) == len(row["response_mask"]) == len(row["logprobs"]) > 0
        assert row["messages"][-1]["role"] == "assistant"
    worked = [row for row in rows if any(message.get("tool_calls") for message in row["messages"])]
    assert len(worked) == 2 and all("I have edited the file." in str(row["messages"][-1]) for row in worked)
    for name in ("shop__total-1", "names__initials-2"):
        spans = json.loads((tmp_path / "out" / f"{name}.spans.json").read_text())
        assert sum(span["name"] == conventions.SPAN_LLM for span in spans) >= 3
        assert {span["attributes"].get("gen_ai.request.model") for span in spans if span["name"] == conventions.SPAN_LLM} != {"local"}
