"""A training as users start it, killed with kill -9 and restarted: it ends like one without interruption, and repeats no paid work."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agl_otel.algorithms.validation import best_weights, validations
from agl_otel.cli import main
from agl_otel.jobs.job import Job
from agl_otel.jobs.sft import SFTRun
from agl_otel.store import LightningStore
from agl_otel.traces.steps import trace_id_of
from agl_otel.types import EnqueueRolloutRequest, ResourcesUpdate, TrainingStep
from agl_otel_hook import conventions
from tests.system.stack_process import Command, naming, run, until

torch = pytest.importorskip("torch", reason="needs the [train] extra")
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "first_light"
VAL = 6
TASKS = f"""
import os, signal
if step := os.environ.get("KILLED_AFTER_THE_PUSH_OF"):  # its weights are pushed and its line is written, but no checkpoint
    from agl_otel.algorithms.grpo.progress import Progress
    save = Progress._save
    async def killed(self):
        if len(self.reports) == int(step): os.kill(os.getpid(), signal.SIGKILL)
        await save(self)
    Progress._save = killed
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
unresponsive_seconds = 15
[data]
train = "tasks.py:train"
val = "tasks.py:val"
[policy]
model = "policy"
[algorithm]
"""
SAME = ("step", "weights_version", "next_version", "reward_mean", "rollouts", "trajectories", "tokens", "off_policy", "loss")


@dataclass(frozen=True)
class Case:
    """An algorithm, its size, and the results that a kill must not change."""

    name: str
    steps: int
    prompts: int
    members: int
    options: str
    same: tuple[str, ...]
    """Fields of a step's line: all except times, names, and counts of attempts that the kill ended."""
    weights: str
    """Path of the last weights in the run's folder."""
    file: str = "model.safetensors"
    """What holds the weights there."""
    algorithm: str = ""
    """Where `name` is not that of the algorithm."""
    killed_after_push: int | None = None
    """The step between whose push and checkpoint the run is killed; None: after a random reply."""

    @property
    def job(self) -> str:
        sizes = f"prompts_per_step = {self.prompts}\ngroup_size = {self.members}\nmax_steps = {self.steps}\n"
        return f'{JOB}name = "{self.algorithm or self.name}"\n{sizes}{self.options}'


GRPO_SAME = ("zero_variance_groups", "resampled", "carried", "oldest", "gradient_norm", "max_ratio_error")
CASES = (
    Case(
        "grpo",
        3,
        3,
        4,
        'val_every = 2\ncheckpoint_every_steps = 2\nmetrics = ["plots", "tensorboard"]\n',
        (*SAME, *GRPO_SAME),
        "checkpoints/step-000003",
    ),
    Case(
        "sft", 2, 4, 3, "val_every = 1\ntop_fraction = 0.5\nepochs = 1\n", (*SAME, "kept", "kept_reward_mean", "loss_before"), "weights/2"
    ),
    Case(
        "grpo-lora",
        3,
        3,
        4,
        "lora_rank = 2\nval_every = 2\ncheckpoint_every_steps = 2\n",
        (*SAME, *GRPO_SAME),
        "checkpoints/step-000003",
        file="adapter/adapter_model.safetensors",
        algorithm="grpo",
        killed_after_push=3,
    ),
)


@dataclass(frozen=True)
class Place:
    folder: Path
    address: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Iterator[Place]:
    """A stack, and a folder with a policy and tasks."""
    folder = tmp_path_factory.mktemp("resumes")
    shutil.copytree(tiny_policy, folder / "policy")
    (folder / "tasks.py").write_text(TASKS)
    ports = {f"AGL_{name}_PORT": "0" for name in ("QUEUE", "OTLP_GRPC", "OTLP_HTTP", "CLICKHOUSE", "PROXY", "WEB")}
    stack_file = folder / "data" / "stack.json"
    with Command("up", "--data-dir", str(folder / "data"), log=folder / "up.log", cwd=folder, env=ports):
        until(stack_file.exists, "the stack is up")
        yield Place(folder, json.loads(stack_file.read_text())["queue"]["address"])


def steps_of(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def sampled(folder: Path) -> int:
    path = folder / "model_server.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def attempts(address: str) -> dict[str, tuple[str, int]]:
    """Return {rollout id: (status, number of attempts)}."""
    async with await LightningStore.connect(address) as store:
        found = await store.query_rollouts()
        tried = await store.queue.query_attempts([rollout.rollout_id for rollout in found])
    count = {rollout.rollout_id: 0 for rollout in found}
    for attempt in tried:
        count[attempt.rollout_id] += 1
    return {rollout.rollout_id: (str(rollout.status), count[rollout.rollout_id]) for rollout in found}


async def defaults(address: str) -> ResourcesUpdate | None:
    """Return the resources of rollouts that name none."""
    async with await LightningStore.connect(address) as store:
        return await store.get_latest_resources()


async def evidence(address: str, folder: Path, version: str) -> list[TrainingStep]:
    """Return the run's steps from the store; each is stored once."""
    run_id = json.loads((folder / "run.json").read_text())["run_id"]
    async with await LightningStore.connect(address) as store:
        found = await store.training_steps(run_id)
        rows = await store.reader.query(
            f"SELECT SpanName AS name, count() AS n FROM otel_traces WHERE TraceId = '{trace_id_of(run_id)}' GROUP BY name"
        )
        spans = {row["name"]: int(row["n"]) for row in rows}
        assert spans.pop(conventions.SPAN_TRAIN_STEP) == len(found)
        assert list(spans) == [conventions.SPAN_TRAIN_RUN], "that it has begun, that it has ended, and both again after the kill"
        assert await store.training_steps(run_id, version=version) == found[-1:]
    return found


def as_recorded(folder: Path) -> list[tuple[Any, ...]]:
    """Return the same from metrics.jsonl."""
    return [
        (each["step"], each["weights_version"], each["next_version"], [tuple(key) for key in each["attempts"]]) for each in steps_of(folder)
    ]


async def test_rollouts_of_a_killed_evaluation_wait_until_the_run_repeats_it(place: Place) -> None:
    """Otherwise runners would take its rollouts at once, with any weights served then, even if the run continues with another step."""
    (place.folder / "left.toml").write_text(CASES[1].job)
    job = Job.load(place.folder / "left.toml")
    tasks = job.tasks("val")[:2]
    async with await LightningStore.connect(place.address) as store:

        async def cut(tuning: SFTRun) -> dict[str, str]:
            """Evaluate, and stop when everything is queued; return the queued rollouts."""
            evaluation = asyncio.create_task(tuning.evaluate_once(tasks, name="after-2"))
            while len(found := await left()) < len(tasks) or "cancelled" in found.values():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.05)
            evaluation.cancel()
            await asyncio.gather(evaluation, return_exceptions=True)
            return found

        async def left() -> dict[str, str]:
            found = await store.query_rollouts(mode_in=["val"])
            return {each.rollout_id: str(each.status) for each in found if (each.metadata or {}).get("evaluation") == "after-2"}

        (others,) = await store.enqueue([EnqueueRolloutRequest(input=tasks[0], mode="val")])
        async with SFTRun(job, store, place.folder / "left") as tuning:
            queued = await cut(tuning)
        assert set(queued.values()) == {"queuing"}
        async with SFTRun(job, store, place.folder / "left") as tuning:
            assert await left() == dict.fromkeys(queued, "cancelled")
            assert await cut(tuning) == dict.fromkeys(queued, "requeuing")
        (unasked,) = await store.query_rollouts(rollout_id_in=[others.rollout_id])
        assert unasked.status == "queuing", "it is not the run's"
        for rollout_id in (others.rollout_id, *queued):  # otherwise runners of later tests would take them
            await store.update_rollout(rollout_id, status="cancelled")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_killed_training_ends_like_an_uninterrupted_one(place: Place, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    if case.name == "grpo-lora":
        pytest.importorskip("peft", reason="needs the [lora] extra")
    (place.folder / f"{case.name}.toml").write_text(case.job)
    source = random.Random(os.environ.get("KILL_SEED", case.name))  # CI kills at the same place each time; set KILL_SEED for others
    kill_after, more = source.randrange(case.steps), source.randrange(case.prompts * case.members)
    words = f"killed after {kill_after} steps and {more} more replies"
    at_push: dict[str, str] = {}
    if case.killed_after_push is not None and "KILL_SEED" not in os.environ:
        words = f"killed after the push of step {case.killed_after_push}"
        at_push = {"KILLED_AFTER_THE_PUSH_OF": str(case.killed_after_push)}
    whole, killed = place.folder / f"{case.name}-whole", place.folder / f"{case.name}-killed"

    def arguments(folder: Path) -> list[str]:
        return ["train", str(place.folder / f"{case.name}.toml"), "--store", place.address, "--run-dir", str(folder), "--json"]

    def trained(folder: Path) -> dict[str, Any]:
        with pytest.raises(SystemExit) as ended:
            main(arguments(folder))  # in this process, which has imported torch; the killed one is separate
        captured = capsys.readouterr()
        assert ended.value.code == 0, words + captured.err[-4000:]
        assert f"the run's folder is {folder}" in captured.err and f"the stack answers on {place.address}" in captured.err
        assert f"scoring before the training: 0/{VAL} rollouts have ended" in captured.err or folder.name.endswith("killed")
        return json.loads(captured.out)

    others = len(asyncio.run(attempts(place.address)))
    expected = trained(whole)
    assert asyncio.run(defaults(place.address)) is None, "rollouts of others must not look for a model server that has ended"
    paid = len(asyncio.run(attempts(place.address))) - others
    assert paid == case.steps * case.prompts * case.members + 3 * VAL, "the last step's validation is the one after the training"

    with Command(*arguments(killed), log=place.folder / f"{case.name}.log", cwd=place.folder, env=at_push) as first:
        if not at_push:
            until(lambda: len(steps_of(killed)) >= kill_after or first.process.poll() is not None, "some steps are done")
            wanted = sampled(killed) + more
            until(lambda: sampled(killed) >= wanted or first.process.poll() is not None, "some more replies are sampled")
            first.process.send_signal(signal.SIGKILL)
        assert first.wait(900) == -signal.SIGKILL, first.output
    until(lambda: naming(killed) == [], "the killed run's processes have ended")
    if at_push:
        assert [path.name for path in (killed / "checkpoints").iterdir()] == ["step-000002"] and len(steps_of(killed)) == 3
        assert (killed / "weights" / "4" / "model.safetensors").exists(), "pushed"
    before = asyncio.run(attempts(place.address))
    result = trained(killed)
    after = asyncio.run(attempts(place.address))
    same = [name for name in expected if name not in ("folder", "result")]
    assert {name: result[name] for name in same} == {name: expected[name] for name in same}, words
    assert [{name: step[name] for name in case.same} for step in steps_of(killed)] == [
        {name: step[name] for name in case.same} for step in steps_of(whole)
    ], words
    assert result["result"]["path"] == expected["result"]["path"].replace(str(whole), str(killed)), words
    last = Path(case.weights) / case.file
    assert (killed / last).read_bytes() == (whole / last).read_bytes(), words
    assert validations(killed) == validations(whole), words
    assert [each.step for each in validations(whole)] == [0, case.steps - 1, case.steps]
    best = best_weights(killed)
    assert best is not None and best == killed / expected["best_validation"]["weights"], words
    assert (best / case.file).exists(), words
    assert len(after) == others + 2 * paid, words
    assert all(after[rollout_id] == (status, tries) for rollout_id, (status, tries) in before.items() if status == "succeeded"), words

    version = str(steps_of(whole)[-1]["next_version"])
    for folder in (whole, killed):
        told = asyncio.run(evidence(place.address, folder, version))
        assert [(each.step, each.version_before, each.version_after, each.attempts) for each in told] == as_recorded(folder), words
        assert all(each.unlinked == 0 for each in told), words
        assert (folder / "plots.png").exists() and list((folder / "tensorboard").glob("events.*")), words
    listed = run("traces", "steps", str(killed), "--version", version, "--store", place.address, "--json", cwd=place.folder)
    assert [each["step"] for each in json.loads(listed.stdout)] == [case.steps], listed.stderr
