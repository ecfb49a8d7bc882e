"""Rollouts by run, on every engine."""

from __future__ import annotations

import random
from collections import Counter

from agl_otel.queue.client import AttemptUpdate, QueueClient, RolloutUpdate
from agl_otel.types import EnqueueRolloutRequest, PromptTemplate, RolloutConfig
from tests.local_queue import LocalQueue

PROMPT = PromptTemplate(template="{q}", engine="f-string")


async def test_a_run_is_named_by_metadata_else_by_the_resources(queue: LocalQueue) -> None:
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


async def test_members_of_a_run_have_their_step(queue: LocalQueue) -> None:
    client = queue.client
    await client.put_resources({"p": PROMPT}, resources_id="rs-a")
    await client.put_resources({"p": PROMPT}, resources_id="rs-a")
    made = await client.enqueue([EnqueueRolloutRequest(input=1, mode="val", metadata={"step": 7}), EnqueueRolloutRequest(input=2)])
    members = await client.query_run_members("rs-a")
    assert members == ([rollout.rollout_id for rollout in made], [7, 2], ["queuing", "queuing"], ["val", ""])
    assert (await client.query_run_members("none")).rollout_ids == []


async def test_metadata_with_invalid_json_elsewhere_hides_no_run(queue: LocalQueue) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=1, metadata={"run": "r", "loss": float("nan"), "step": "x"})])
    assert [run.rollouts for run in await queue.client.query_runs()] == [1]
    assert len((await queue.client.query_run_members((await queue.client.query_runs())[0].run_id)).rollout_ids) == 1


async def test_counters_of_runs_equal_what_grouping_the_rollouts_gives(queue: LocalQueue) -> None:
    client, chance = queue.client, random.Random(11)
    await client.put_resources({"p": PROMPT}, resources_id="rs-a")
    names = ({"run": "a", "step": 1}, {"run": "b"}, {"step": 4}, {"run": 5}, {"run": "x" * 257}, {"run": "\ud800"}, {"run": 'q"\\\u2028'})
    for _ in range(4):
        new = [
            EnqueueRolloutRequest(
                input=0, mode=chance.choice(("train", "val", None)), metadata=chance.choice(names), config=RolloutConfig(max_attempts=2)
            )
            for _ in range(8)
        ]
        await client.enqueue(new)
        claimed = await client.claim(6, worker_id="w")
        queue.clock.advance(1)
        ends = [
            AttemptUpdate(rollout_id=each.rollout_id, attempt_id="latest", status=chance.choice(("failed", "succeeded")))
            for each in claimed
        ]
        await client.update_attempts(ends[:4])
        await client.release(claimed[4:5])
        await _counters_are_right(client)
    found = list(await client.query_rollouts())
    named = [RolloutUpdate(rollout_id=each.rollout_id, metadata={"run": "c", "step": 9}) for each in found[:3]]
    await client.update_rollouts([*named, RolloutUpdate(rollout_id=found[4].rollout_id, clear=["resources_id", "metadata"])])
    await _counters_are_right(client)
    await client.delete([each.rollout_id for each in await client.query_rollouts(run="a")])
    await queue.sweep()
    await _counters_are_right(client)
    assert "a" not in {run.run_id for run in await client.query_runs()}
    await queue.restart()
    await _counters_are_right(queue.client)


async def _counters_are_right(client: QueueClient) -> None:
    counted = {run.run_id: run for run in await client.query_runs()}
    every = {rollout.rollout_id: rollout for rollout in await client.query_rollouts()}
    assert sum(run.rollouts for run in counted.values()) == len(every)
    for run_id, run in counted.items():
        members = await client.query_run_members(run_id)
        own = [every[rollout_id] for rollout_id in members.rollout_ids]
        attempts = await client.query_attempts(members.rollout_ids)
        assert (run.by_status, run.by_mode) == (Counter(each.status for each in own), Counter(each.mode or "" for each in own))
        assert run.attempts == len(attempts)
        ends = [each.end_time for each in own if each.end_time is not None]
        assert run.start_time <= min(each.start_time for each in own) and (run.end_time or 0.0) >= max(ends, default=0.0)
