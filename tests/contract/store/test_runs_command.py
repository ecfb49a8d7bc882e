"""`agl-otel runs` on a real stack."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from agl_otel.adapters.gates import REFUSALS
from agl_otel.cli import main
from agl_otel.cli.runs import read_run
from agl_otel.errors import DataError
from agl_otel.jobs.job import AgentSpec, DataSpec, Job
from agl_otel.jobs.run import JobRun
from agl_otel.queue.client import AttemptUpdate
from agl_otel.store import LightningStore
from agl_otel.types import TrainingStep
from agl_otel_hook import conventions
from tests.contract.store.test_export import call_of, reward_of, span_of


class Cli:
    def __init__(self, store: LightningStore, capsys: pytest.CaptureFixture[str]) -> None:
        self._store, self._capsys = store, capsys

    def run(self, *arguments: str, code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["runs", *arguments, "--store", self._store._source.address()])  # pyright: ignore[reportPrivateUsage]
        captured = self._capsys.readouterr()
        assert ended.value.code == code, captured
        return captured.out if code == 0 else captured.err

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--json"))


@pytest.fixture
def cli(store: LightningStore, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("COLUMNS", "200")
    return Cli(store, capsys)


async def a_run(store: LightningStore, rewards: list[float]) -> str:
    """A run with one rollout and one training step for each reward."""
    run_id = f"grpo-{uuid.uuid4().hex[:8]}"
    for number, value in enumerate(rewards, 1):
        begun = await store.start_rollout({"question": 1}, mode="train", metadata={"run": run_id, "step": number})
        ids = (begun.rollout_id, begun.attempt.attempt_id)
        await store.add_many_spans([call_of(*ids, 1), reward_of(*ids, 2, value)])
        await store.update_attempt(*ids, status="succeeded")
        times: dict[str, Any] = {"start_time": begun.start_time, "end_time": begun.start_time + 1}
        step = TrainingStep(run_id=run_id, algorithm="grpo", step=number, version_after=str(number + 1), metrics={"loss": -value}, **times)
        await store.record_step(step)
    return run_id


def folder_of(path: Path, run_id: str, **options: Any) -> str:
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"run_id": run_id, "algorithm": "grpo", "seed": 7, "options": options}))
    return str(path)


@pytest.fixture
async def two(store: LightningStore) -> tuple[str, str]:
    return await a_run(store, [0.25, 0.75]), await a_run(store, [0.5, 1.0])


@pytest.fixture
async def fall(store: LightningStore) -> str:
    return await a_run(store, [0.5, 0.75, 0.0])


def test_runs_are_listed_with_what_both_stores_know(cli: Cli, two: tuple[str, str]) -> None:
    listed = cli.json("ls", "--limit", "2")
    assert [item["run_id"] for item in listed["items"]] == [two[1], two[0]] and listed["total"] >= 2
    first = listed["items"][1]
    assert (first["rollouts"]["by_status"], first["training"]["steps"], first["training"]["last_version"]) == ({"succeeded": 2}, 2, "3")
    assert two[0] in cli.run("ls")


def test_a_run_has_rewards_verdicts_tokens_and_a_cost(cli: Cli, two: tuple[str, str]) -> None:
    found = cli.json("show", two[0], "--price", "1000000", "0")
    assert (found["metrics"]["reward"], found["metrics"]["loss"]) == ({"1": 0.25, "2": 0.75}, {"1": -0.25, "2": -0.75})
    assert (found["verdicts"], found["totals"]["prompt_tokens"], found["cost"]) == ({"unproven": 2}, 4, 4.0)
    text = cli.run("show", two[0])
    assert "reward ▁█ 0.25 → 0.75" in text and "succeeded 2" in text
    assert "there is no run 'none': `agl-otel runs ls` lists the runs" in cli.run("show", "none", code=2)


@pytest.fixture
async def cycles(store: LightningStore) -> str:
    """A run of `improve` with a promotion, a canary that was rolled back, and an alarm."""
    run_id = f"improve-{uuid.uuid4().hex[:8]}"
    begun = await store.start_rollout({"question": 1})
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    await store.add_many_spans([call_of(*ids, 1), reward_of(*ids, 2, 1.0)])
    gate = {"held_out_before": 0.25, "held_out_after": 0.5, "held_out_gain_low": 0.1, "held_out_gain_high": 0.4, "drift": 0.02}
    canary = {"canary_share": 0.1, "canary_begun": 40, "canary_rated": 34, "canary_mean": 0.25, "canary_promoted_mean": 0.5}
    made = [("promoted", "", gate | canary), ("rolled_back", "canary_worse", gate | canary), ("refused", "trusted_falls, drift", gate)]
    for number, (verdict, why, found) in enumerate(made, 1):
        metrics = {"verdict": verdict, "why": why, "selection": f"{run_id}@{number}", "training_run": f"grpo-{number}", **found}
        versions = {"version_before": str(2 * number - 1), "version_after": str(2 * number + (1 if found is not gate else -1))}
        times: dict[str, Any] = {"start_time": begun.start_time + number, "end_time": begun.start_time + number + 1}
        named: dict[str, Any] = {"run_id": run_id, "algorithm": "improve", "step": number, "resources_id": "production"}
        await store.record_step(TrainingStep(**named, **versions, **times, metrics=metrics, attempts=[(begun.rollout_id, "")]))
    return run_id


def test_a_run_of_improve_has_its_cycles(cli: Cli, cycles: str, two: tuple[str, str]) -> None:
    run_id = cycles
    found = cli.json("show", run_id)["cycles"]
    assert [(each["verdict"], [reason["key"] for reason in each["reasons"]]) for each in found] == [
        ("promoted", []),
        ("rolled_back", ["canary_worse"]),
        ("refused", ["trusted_falls", "drift"]),
    ]
    assert [each["selection"] for each in found] == [f"{run_id}@{number}" for number in (1, 2, 3)]
    assert {each["attempts"] for each in found} == {1} and found[2]["canary_share"] is None
    text = cli.run("show", run_id)
    assert "0.250 against 0.500, 34 of 40 rated" in text and "1 → 3" in text and "refused, ALARM" in text
    assert f"cycle 3 refused: {REFUSALS['trusted_falls']}" in text and f"cycle 2 rolled back: {REFUSALS['canary_worse']}" in text
    [listed] = [line for line in cli.run("ls").splitlines() if run_id in line]
    assert "1 of 3 promoted" in listed
    assert cli.json("show", two[0])["cycles"] == []


async def ended(store: LightningStore, folder: Path, error: BaseException | None = None) -> str:
    """A job that had enqueued a rollout of its first step, and ended so; the id of its run."""
    (folder / "agent.py").write_text("def agent(task): ...")
    (folder / "job.toml").write_text('[agent]\nfunction = "agent.py:agent"\n[data]\ntrain = "tasks.jsonl"\n')
    run = JobRun(Job.load(folder / "job.toml"), store, folder / uuid.uuid4().hex)
    with contextlib.suppress(DataError, asyncio.CancelledError):
        async with run:
            begun = await store.start_rollout({}, mode="train", metadata={"run": run.run_id, "step": 1})
            await store.add_many_spans([reward_of(begun.rollout_id, begun.attempt.attempt_id, 1, 0.5)])
            await store.update_attempt(begun.rollout_id, begun.attempt.attempt_id, status="succeeded")
            if error is not None:
                raise error
    return run.run_id


async def test_how_a_job_ended_is_recorded(store: LightningStore, tmp_path: Path) -> None:
    for error, outcome in ((None, "finished"), (asyncio.CancelledError(), "interrupted"), (DataError("no data"), "error: no data")):
        (found,) = await store.training_runs(run_id=await ended(store, tmp_path, error))
        assert (found.algorithm, found.steps, found.last_step, found.outcome) == ("grpo", 0, 0, outcome)


@pytest.fixture
async def failed(store: LightningStore, tmp_path: Path) -> str:
    return await ended(store, tmp_path, DataError("step 1 has nothing to train on\ngreedy: why"))


def test_the_error_of_a_run_is_shown_and_the_step_that_it_did_not_make_is_not(cli: Cli, failed: str) -> None:
    text = cli.run("show", failed)
    rows = dict(line.split("│")[1:3] for line in text.splitlines() if line.count("│") == 3)
    assert {name.strip(): value.strip() for name, value in rows.items()}.items() >= {"steps": "0", "outcome": "error"}.items()
    assert "error: step 1 has nothing to train on\n    greedy: why\n" in text
    assert "┃ part ┃ reward ┃" in text and "┃ step ┃" not in text, "its rollouts are those of a step that it did not make"
    assert cli.json("show", failed)["outcome"] == "error: step 1 has nothing to train on\ngreedy: why"
    (line,) = [line for line in cli.run("ls").splitlines() if failed in line]
    assert [cell for cell in line.split() if cell.isalnum()][:3] == ["grpo", "error", "0"], line


@pytest.fixture
async def unmade(store: LightningStore) -> str:
    """A run that made two steps, and ended while it had rollouts of a third."""
    run_id = await a_run(store, [0.25, 0.75])
    begun = await store.start_rollout({"question": 1}, mode="train", metadata={"run": run_id, "step": 3})
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    await store.add_many_spans([call_of(*ids, 1), reward_of(*ids, 2, 1.0)])
    await store.update_attempt(*ids, status="succeeded")
    await store.record_outcome(run_id, "error: step 3 has nothing to train on", algorithm="grpo")
    return run_id


def test_the_rollouts_of_a_step_that_was_not_made_are_no_row(cli: Cli, unmade: str) -> None:
    assert cli.json("show", unmade)["metrics"]["reward"] == {"1": 0.25, "2": 0.75}
    assert "reward ▁█ 0.25 → 0.75" in cli.run("show", unmade)


@pytest.fixture
async def ended_at_once(store: LightningStore) -> str:
    run_id = f"grpo-{uuid.uuid4().hex[:8]}"
    await store.record_outcome(run_id, "error: the model server is away", algorithm="grpo")
    return run_id


def test_a_run_that_ended_before_its_first_rollout_is_shown(cli: Cli, ended_at_once: str) -> None:
    assert "error: the model server is away" in cli.run("show", ended_at_once)


def test_a_fall_is_shown_from_the_first_to_the_last_step(cli: Cli, fall: str) -> None:
    assert "reward ▅█▁ 0.5 → 0\n" in cli.run("show", fall)


def test_runs_are_compared_with_each_other(cli: Cli, two: tuple[str, str], tmp_path: Path) -> None:
    folders = [folder_of(tmp_path / f"{n}", run_id, group_size=4 * n, update={"lr": 1.0}) for n, run_id in enumerate(two, 1)]
    found = cli.json("compare", *folders)
    assert found["differences"] == {"group_size": [4, 8]}
    assert [run["metrics"]["reward"] for run in found["runs"]] == [{"1": 0.25, "2": 0.75}, {"1": 0.5, "2": 1.0}]
    text = cli.run("compare", *folders, "--metric", "loss")
    assert "differences in configuration" in text and "group_size" in text and "-0.75" in text and "update.lr" not in text
    assert f"the configuration of {two[0]}, {two[1]} is unknown" in cli.run("compare", *two).replace("\n", " ")
    assert "no run has a metric 'x'" in cli.run("compare", *two, "--metric", "x", code=2)


async def test_prompts_are_counted_whole_and_each_call_once(store: LightningStore) -> None:
    """A call, one that continues it with two choices, one of a server without token ids, and the agent's own span of it."""
    run_id = f"grpo-{uuid.uuid4().hex[:8]}"
    begun = await store.start_rollout({"question": 1}, mode="train", metadata={"run": run_id, "step": 1})
    ids = (begun.rollout_id, begun.attempt.attempt_id)
    used = {"gen_ai.usage.input_tokens": 9, "gen_ai.usage.output_tokens": 7}
    tokens = {conventions.LLM_PROMPT_TOKEN_IDS: [5], conventions.LLM_RESPONSE_TOKEN_IDS: [6, 7, 8]}
    continued = {conventions.LLM_CALL: 2, conventions.LLM_PREFIX_CALL: 1, **tokens, "gen_ai.usage.input_tokens": 5}
    spans = [
        call_of(*ids, 1),
        span_of(*ids, 2, conventions.SPAN_LLM, {**continued, conventions.LLM_CHOICE: 0}),
        span_of(*ids, 3, conventions.SPAN_LLM, {**continued, conventions.LLM_CHOICE: 1}),
        span_of(*ids, 4, conventions.SPAN_LLM, {conventions.LLM_CALL: 4, conventions.LLM_CHOICE: 0, **used}),
        span_of(*ids, 5, "chat m", used),
    ]
    await store.add_many_spans(spans)
    await store.update_attempt(*ids, status="succeeded")
    totals = (await read_run(store, run_id)).totals()
    assert (totals["prompt_tokens"], totals["response_tokens"]) == (2 + 5 + 9, 2 + 3 + 3 + 7)
    (figures,) = await store.reader.figures(await store.queue.query_attempts([begun.rollout_id]))
    assert figures.prompt_tokens == totals["prompt_tokens"]


async def scored(store: LightningStore, tasks: int, *, error: str | None = None, **named: Any) -> list[str]:
    """Evaluate a job's agent on so many tasks, with rewards; the ids of the rollouts. With an `error` the first one fails."""
    job = Job(agent=AgentSpec(function="agent.py:agent"), data=DataSpec(train="tasks.jsonl"))
    evaluation = asyncio.create_task(JobRun(job, store, Path()).evaluate(range(tasks), **named))
    claimed: list[str] = []
    while len(claimed) < tasks and not evaluation.done():
        begun = await store.dequeue_rollout()
        if begun is None or (begun.metadata or {}).get("run") != named["run_id"]:  # or one that another test has left, which is due again
            await asyncio.sleep(0)
            continue
        ids = (begun.rollout_id, begun.attempt.attempt_id)
        await store.add_many_spans([call_of(*ids, 1), reward_of(*ids, 2, 1.0)])
        failed = error is not None and not claimed
        outcome: dict[str, Any] = {"status": "failed", "error": error} if failed else {"status": "succeeded"}
        await store.queue.update_attempts([AttemptUpdate(rollout_id=ids[0], attempt_id=ids[1], **outcome)])
        claimed.append(begun.rollout_id)
    assert sorted((await evaluation).rollout_ids) == sorted(claimed)
    return claimed


async def test_a_score_that_counts_failed_rollouts_as_0_quotes_their_errors(
    store: LightningStore, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a chat template refuses a role that the agent sends for some tasks only: the run goes on, and must say why."""
    run_id = f"grpo-{uuid.uuid4().hex[:8]}"
    await scored(store, 2, run_id=run_id, name="before")
    assert "counts as 0" not in caplog.text
    await scored(store, 3, run_id=run_id, name="after", error="answer raised BadRequestError: Unexpected role: developer")
    words = "of those that failed: 1 × answer raised BadRequestError: Unexpected role: developer"
    assert f"1 of 3 val rollouts got no reward, which counts as 0; {words}" in caplog.text


async def test_scores_before_the_first_step_are_listed_under_their_run(cli: Cli, store: LightningStore) -> None:
    run_id = f"grpo-{uuid.uuid4().hex[:8]}"
    found = await scored(store, 2, run_id=run_id, name="before")
    assert found == [f"ro-{run_id}-before-0000", f"ro-{run_id}-before-0001"]
    found += await scored(store, 1, run_id=run_id, mode="test")
    assert sorted(rollout.rollout_id for rollout in await store.queue.query_rollouts(run=run_id)) == sorted(found)
    (known,) = await store.queue.query_runs(run_id)
    assert known.by_mode == {"val": 2, "test": 1}
