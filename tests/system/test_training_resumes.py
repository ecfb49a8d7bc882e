"""A GRPO run as users start one, killed with kill -9 and started again: it ends as one that was left alone, and pays for nothing twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from agl_otel.store import Store
from agl_otel.traces.steps import trace_id_of
from agl_otel.types import TrainingStep
from tests.system.stack_process import Command, naming, run, until

pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "first_light"
STEPS, PROMPTS, MEMBERS, VAL = 4, 3, 4, 6
TASKS = f"""
from agl_otel.algorithms.grpo.tiny import BEHAVIOURS, HELD_OUT_NUMBERS, TRAIN_NUMBERS, question
def tasks(numbers): return [{{"question": question(n), "expected": str(BEHAVIOURS[1](n % 10))}} for n in numbers]
def train(): return tasks(TRAIN_NUMBERS[:9])
def val(): return tasks(HELD_OUT_NUMBERS[:{VAL}])
"""
JOB = f"""
[agent]
function = "{EXAMPLE}/agent.py:answer"
grader = "{EXAMPLE}/grade.py:grade"
concurrency = 2
[data]
train = "tasks.py:train"
val = "tasks.py:val"
[algorithm]
name = "grpo"
prompts_per_step = {PROMPTS}
group_size = {MEMBERS}
max_steps = {STEPS}
"""
SAME = (
    *("step", "weights_version", "reward_mean", "rollouts", "trajectories", "tokens", "off_policy", "flat_groups", "resampled", "carried"),
    *("oldest", "loss", "gradient_norm", "max_ratio_error"),
)
"""Of a step's line: all but times, names, and what attempts that the kill ended have left behind."""


def steps_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sampled(folder: Path) -> int:
    path = folder / "model_server.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def attempts(address: str) -> dict[str, tuple[str, int]]:
    """{rollout id: (its status, how often it was tried)}."""
    async with await Store.connect(address) as store:
        found = await store.query_rollouts()
        tried = await store.queue.query_attempts([rollout.rollout_id for rollout in found])
    count = {rollout.rollout_id: 0 for rollout in found}
    for attempt in tried:
        count[attempt.rollout_id] += 1
    return {rollout.rollout_id: (str(rollout.status), count[rollout.rollout_id]) for rollout in found}


async def evidence(address: str, folder: Path) -> list[TrainingStep]:
    """What the store tells of the run's steps, each of which it has once."""
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    async with await Store.connect(address) as store:
        found = await store.training_steps(run_id)
        rows = await store.reader.query(f"SELECT count() AS n FROM otel_traces WHERE TraceId = '{trace_id_of(run_id)}'")
        assert int(rows[0]["n"]) == len(found)
        assert await store.training_steps(run_id, version=STEPS + 1) == found[-1:]
    return found


def as_told(folder: Path) -> list[tuple[Any, ...]]:
    """The same of metrics.jsonl."""
    return [
        (each["step"], each["weights_version"], each["next_version"], [tuple(key) for key in each["attempts"]]) for each in steps_of(folder)
    ]


def test_a_training_that_is_killed_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / "job.toml").write_text(JOB)
    source = random.Random()
    kill_after, more = source.randrange(STEPS), source.randrange(PROMPTS * MEMBERS)
    words = f"killed after {kill_after} steps and {more} more replies"
    ports = {f"AGL_{name}_PORT": "0" for name in ("QUEUE", "OTLP_GRPC", "OTLP_HTTP", "CLICKHOUSE", "PROXY", "WEB")}
    stack_file = tmp_path / "data" / "stack.json"
    with Command("up", "--data-dir", str(tmp_path / "data"), log=tmp_path / "up.log", cwd=tmp_path, env=ports):
        until(stack_file.exists, "the stack is up")
        address = json.loads(stack_file.read_text())["queue"]["address"]

        def arguments(folder: Path) -> list[str]:
            return ["train", "job.toml", "--store", address, "--run-dir", str(folder), "--json"]

        whole = tmp_path / "whole"
        done = run(*arguments(whole), cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        expected = json.loads(done.stdout)
        paid = len(asyncio.run(attempts(address)))
        assert paid == STEPS * PROMPTS * MEMBERS + 2 * VAL

        killed = tmp_path / "killed"
        with Command(*arguments(killed), log=tmp_path / "first.log", cwd=tmp_path) as first:
            until(lambda: len(steps_of(killed)) >= kill_after or first.process.poll() is not None, "some steps are done")
            wanted = sampled(killed) + more
            until(lambda: sampled(killed) >= wanted or first.process.poll() is not None, "some more replies are sampled")
            first.process.send_signal(signal.SIGKILL)
            first.process.wait()
        until(lambda: naming(killed) == [], "the killed run's processes have ended")
        before = asyncio.run(attempts(address))
        again = run(*arguments(killed), cwd=tmp_path)
        assert again.returncode == 0, words + again.stderr[-4000:]
        after = asyncio.run(attempts(address))
        for folder in (whole, killed):
            told = asyncio.run(evidence(address, folder))
            assert [(each.step, each.version_before, each.version_after, each.attempts) for each in told] == as_told(folder), words
            assert all(each.unlinked == 0 and len(each.attempts) == each.samples for each in told), words
        listed = run("traces", "steps", str(killed), "--version", str(STEPS + 1), "--store", address, "--json", cwd=tmp_path)
        assert [each["step"] for each in json.loads(listed.stdout)] == [STEPS], listed.stderr
        result = json.loads(again.stdout)
    same = [name for name in expected if name != "folder"]
    assert {name: result[name] for name in same} == {name: expected[name] for name in same}, words
    assert [{name: step[name] for name in SAME} for step in steps_of(killed)] == [
        {name: step[name] for name in SAME} for step in steps_of(whole)
    ], words
    last = Path("checkpoints") / f"step-{STEPS:06d}" / "model.safetensors"
    assert (killed / last).read_bytes() == (whole / last).read_bytes(), words
    assert len(after) == 2 * paid, words
    assert all(after[rollout_id] == (status, tries) for rollout_id, (status, tries) in before.items() if status == "succeeded"), words
