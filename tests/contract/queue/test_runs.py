"""Rollouts by run, on every engine."""

from __future__ import annotations

from agl_otel.queue.client import AttemptUpdate
from agl_otel.queue.testing import LocalQueue
from agl_otel.types import EnqueueRolloutRequest, PromptTemplate

PROMPT = PromptTemplate(template="{q}", engine="f-string")


async def test_a_run_is_what_metadata_names_else_the_resources(queue: LocalQueue) -> None:
    client = queue.client
    await client.enqueue([EnqueueRolloutRequest(input=0)])
    await client.put_resources({"p": PROMPT}, resources_id="rs-a")
    named = {"run": "search-1", "step": 3, "note": {"run": "no"}}
    await client.enqueue([EnqueueRolloutRequest(input=1, mode="train"), EnqueueRolloutRequest(input=2, mode="val", metadata={"step": 7})])
    made = await client.enqueue([EnqueueRolloutRequest(input=3, mode="train", metadata=named)] * 2)
    claimed = (await client.claim(10))[-1]
    await client.update_attempts([AttemptUpdate(rollout_id=claimed.rollout_id, attempt_id=claimed.attempt.attempt_id, status="succeeded")])
    runs = {run.run_id: run for run in await client.query_runs()}
    assert set(runs) == {"search-1", "rs-a", ""}
    found = runs["search-1"]
    assert (found.rollouts, found.by_mode, found.attempts, found.last_step) == (2, {"train": 2}, 2, 3)
    assert found.by_status == {"preparing": 1, "succeeded": 1} and found.end_time is not None and found.start_time <= found.end_time
    assert (runs["rs-a"].by_mode, runs["rs-a"].last_step, runs[""].by_mode) == ({"train": 1, "val": 1}, 7, {"": 1})
    assert await client.query_runs("search-1") == [found]
    assert await client.query_runs("none") == []
    page = await client.query_rollouts(run="search-1", limit=1)
    assert ([rollout.rollout_id for rollout in page], page.total) == ([made[0].rollout_id], 2)
    assert [rollout.input for rollout in await client.query_rollouts(run="search-1", status_in=["succeeded"])] == [3]


async def test_members_of_a_run_say_which_step_made_them(queue: LocalQueue) -> None:
    client = queue.client
    await client.put_resources({"p": PROMPT}, resources_id="rs-a")
    await client.put_resources({"p": PROMPT}, resources_id="rs-a")
    made = await client.enqueue([EnqueueRolloutRequest(input=1, mode="val", metadata={"step": 7}), EnqueueRolloutRequest(input=2)])
    members = await client.query_run_members("rs-a")
    assert members == ([rollout.rollout_id for rollout in made], [7, 2], ["queuing", "queuing"], ["val", ""])
    assert (await client.query_run_members("none")).rollout_ids == []


async def test_metadata_that_is_no_json_elsewhere_hides_no_run(queue: LocalQueue) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=1, metadata={"run": "r", "loss": float("nan"), "step": "x"})])
    assert [run.rollouts for run in await queue.client.query_runs()] == [1]
    assert len((await queue.client.query_run_members((await queue.client.query_runs())[0].run_id)).rollout_ids) == 1
