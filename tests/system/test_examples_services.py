"""The examples whose models are trained by other services or by the example itself, with small services that really learn."""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch

from agl_otel.adapters import Reading, rows_of
from agl_otel.algorithms.grpo.tiny import make_policy
from agl_otel.jobs.job import Job
from agl_otel.types import LLM
from tests.matrix.model import ScriptedModel
from tests.matrix.script import Message, Request
from tests.system.examples import EXAMPLES, Stage, assert_whole, finished, rewards, serving, stage, started

pytestmark = [pytest.mark.full, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def on(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with stage(tmp_path_factory.mktemp("stack")) as running:
        yield running


async def trained(on: Stage, example: str, tmp_path: Path, *changes: tuple[str, str], job_file: str = "job.toml") -> str:
    """Run an example's own job file on the stage, in a copy of its folder, with some of its text replaced; return the output."""
    folder = tmp_path / example
    shutil.copytree(EXAMPLES / example, folder, ignore=shutil.ignore_patterns("__pycache__"))
    job = (folder / job_file).read_text()
    for old, new in changes:
        assert old in job, f"{example}/{job_file} has no {old!r}"
        job = job.replace(old, new)
    (folder / job_file).write_text(job)
    where = ("--store", on.address, "--run-dir", tmp_path / "run", "--json")
    return await finished(sys.executable, "-m", "agl_otel", "train", folder / job_file, *where, cwd=folder)


async def test_azure_loop_tunes_deploys_prunes_and_validates_and_the_score_rises(on: Stage, tmp_path: Path) -> None:
    async with serving(sys.executable, EXAMPLES / "azure" / "service.py", "--port", "0") as service:
        output = await trained(on, "azure", tmp_path, ("http://127.0.0.1:8095", service), ("poll_seconds = 0.1", "poll_seconds = 0.05"))
        async with aiohttp.ClientSession() as session, session.get(f"{service}/account/deployments") as answer:
            deployed = [each["name"] for each in (await answer.json())["value"]]
    *steps, last = [json.loads(line) for line in output.splitlines() if line.startswith(('{"step"', '{"scores"'))]
    assert [step["rows"] for step in steps] == [24, 24], "half of four rollouts of 12 tasks"
    assert len(last["scores"]) == 3 and last["scores"][-1] > max(0.5, last["scores"][0] + 0.2), output
    assert deployed == ["gpt-4.1-mini", "gpt-4.1-mini-v2"] and steps[-1]["deployed"] == ["gpt-4.1-mini-v2"]


async def test_tinker_learns_from_traces_of_its_own_sampler_algorithm_and_runners_apart(on: Stage) -> None:
    main, course = EXAMPLES / "tinker" / "main.py", ("--steps", "5", "--group-size", "12")  # 240 games, the same each time by their seeds
    async with started(sys.executable, main, "runner", "--store", on.address):
        output = await finished(sys.executable, main, "algo", "--store", on.address, *course)
    lines = [json.loads(line) for line in output.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5] and {line["stale"] for line in lines} == {0}
    assert lines[0]["reward"] < 0.35 and lines[-1]["reward"] >= lines[0]["reward"] + 0.2, lines


async def test_tinker_is_trained_by_its_job_file(on: Stage, tmp_path: Path) -> None:
    output = await trained(on, "tinker", tmp_path, ("steps = 8", "steps = 1"), ("group_size = 16", "group_size = 2"))
    [line] = [json.loads(line) for line in output.splitlines() if line.startswith('{"step"')]
    assert line["calls"] >= 8 and line["stale"] == 0


async def test_tinker_in_one_call_and_without_training(on: Stage) -> None:
    main = EXAMPLES / "tinker" / "main.py"
    output = await finished(sys.executable, main, "oneclick", "--steps", "1", "--group-size", "2")  # services log on a busy machine
    [step] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert step["calls"] >= 8
    async with ScriptedModel(lambda request, call_id: Message("assistant", "a")) as model:
        output = await finished(sys.executable, main, "dryrun", "--endpoint", model.url, "--model", "m")
    assert output.splitlines() == ["bird: reward 1.0", "cat: reward 0.0", "plane: reward 0.0", "stone: reward 0.0"]


@pytest.mark.long
async def test_the_unsloth_loop_trains_on_its_best_calls_and_serves_the_next_version(on: Stage, tmp_path: Path, tiny_policy: Path) -> None:
    folder = EXAMPLES / "unsloth"
    job = Job.load(folder / "job.toml")
    agent = ("--function", str(job.agent.function), "--grader", str(job.agent.grader))
    async with on.runner(folder, *agent):
        arguments = ("--store", on.address, "--out", str(tmp_path), "--model", str(tiny_policy), "--rounds", "1", "--tasks", "16")
        output = await finished(sys.executable, folder / "loop.py", *arguments, cwd=folder)
    before, after = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    rows = [json.loads(line) for line in (tmp_path / "version-1.jsonl").read_text().splitlines()]
    assert before["rows"] == len(rows) == 32, "the best quarter of 128 rollouts"
    for row in rows:
        assert len(row["input_ids"]) == len(row["labels"]) == len(row["attention_mask"])
        assert {label for label, token in zip(row["labels"], row["input_ids"], strict=True) if label not in (-100, token)} == set()
    assert after["reward"] > before["reward"] + 0.15, output
    assert job.algorithm["name"] == "sft" and len(job.tasks("train")) > 64


async def test_unsloth_itself_trains_on_such_rows(tmp_path: Path) -> None:
    if importlib.util.find_spec("unsloth") is None or not torch.cuda.is_available():
        pytest.skip("Unsloth needs a GPU, and is not installed")
    policy = make_policy(tmp_path / "model")
    row = {"input_ids": [1, 5, 9, 2], "labels": [-100, -100, 9, 2], "attention_mask": [1, 1, 1, 1]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 8)
    script = EXAMPLES / "unsloth" / "train.py"
    await finished(sys.executable, script, tmp_path / "rows.jsonl", policy, tmp_path / "out", "--backend", "unsloth", "--epochs", "1")
    assert list((tmp_path / "out").glob("*.safetensors"))


def reads_charts(request: Request, call_id: str) -> Message:
    """Answer one question within 5 %, and the next far off."""
    return Message("assistant", "It is 51." if "red" in request.messages[-1].text else "I see 9999")


async def test_chartqas_images_reach_the_exported_rows(on: Stage) -> None:
    folder = EXAMPLES / "chartqa"
    charts = runpy.run_path(str(folder / "charts.py"))
    tasks = [
        {
            "image": charts["chart"]({"red": red, "green": 20, "blue": 30}),
            "question": f"How high is the {colour} bar?",
            "expected": str(red),
        }
        for red, colour in ((50, "red"), (60, "blue"))
    ]
    agent = ("--function", "agent.py:answer")
    async with ScriptedModel(reads_charts) as model:
        llm = LLM(endpoint=model.url, model="scripted")
        traces = await on.run(folder, tasks, {"main_llm": llm}, agent=agent, grader="grade.py:grade")
        assert_whole(traces, model, calls=2)
        sent = {body["messages"][0]["content"][0]["image_url"]["url"] for body in model.asked}
    assert list(rewards(traces).values()) == [1.0, 0.0] and sent == {task["image"] for task in tasks}
    assert tasks[0]["image"].startswith("data:image/png;base64,iVBORw0KGgo")
    asked = {rollout.rollout_id: rollout.input["image"] for rollout in traces.rollouts}
    found = rows_of(Reading(form="trajectories"), traces).rows
    assert {row["rollout_id"]: row["images"] for row in found} == {rollout_id: [image] for rollout_id, image in asked.items()}
    assert all(asked[row["rollout_id"]] in json.dumps(row["messages"][0]["content"]) for row in found)


async def test_chartqas_job_scores_a_model(on: Stage, tmp_path: Path) -> None:
    async with ScriptedModel(reads_charts) as model:
        output = await trained(on, "chartqa", tmp_path, ("http://127.0.0.1:8000/v1", model.url))
    told = json.loads(output.splitlines()[-1])
    tasks = runpy.run_path(str(EXAMPLES / "chartqa" / "charts.py"))["val"]()
    right = sum("red" in task["question"] and abs(51 - int(task["expected"])) <= 0.05 * int(task["expected"]) for task in tasks)
    assert (told["rollouts"], told["succeeded"], told["score"]) == (16, 16, {"train": right / 16}) and model.asked, output


async def test_chartqa_with_a_vision_model(on: Stage) -> None:
    url, name = os.environ.get("CHARTQA_BASE_URL"), os.environ.get("CHARTQA_MODEL")
    if not url or not name:
        pytest.skip("no vision model is at hand: CHARTQA_BASE_URL and CHARTQA_MODEL name none")
    folder = EXAMPLES / "chartqa"
    tasks = runpy.run_path(str(folder / "charts.py"))["val"]()
    llm = LLM(endpoint=url, model=name)
    traces = await on.run(folder, tasks, {"main_llm": llm}, agent=("--function", "agent.py:answer"), grader="grade.py:grade")
    assert {verdict.kind for verdict in traces.verdicts.values()} == {"complete"} and len(rewards(traces)) == len(tasks)


async def test_the_room_selector_finds_the_full_prompt_and_runs_without_training(on: Stage, tmp_path: Path) -> None:
    folder = EXAMPLES / "apo"
    async with serving(sys.executable, folder / "server.py", "--port", "0") as url:
        output = await trained(on, "apo", tmp_path, ("http://127.0.0.1:8099/v1", url), job_file="rooms.toml")
        found = json.loads(output.splitlines()[-1])
        assert found["best_score"] == 1.0 and found["best"]["prompt_template"].startswith("Choose the smallest room that is free"), found
        scores = [json.loads(line)["score"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert len(scores) == 4 and sorted(scores)[-2] < 1.0, scores
        lines = (await finished(sys.executable, folder / "debug.py", "--endpoint", url)).splitlines()
    told = [line for line in lines if "reward" in line]
    assert len(told) == 7 and told[0].startswith("9:00 for 2: ") and told[0].endswith("reward 0.0"), lines
    assert lines.count("  said: a call of a tool") == 1 and "  said: Hall" in lines
