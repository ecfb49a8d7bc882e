"""Groups of rollouts over a real queue: which ones a step takes, and what happens to the others."""

from __future__ import annotations

import asyncio

from agl_otel.algorithms.grpo.groups import Group, InFlight, RewardWait
from agl_otel.store import LightningStore
from agl_otel.types import EnqueueRolloutRequest

HANG_SECONDS = 120.0
NONE_OVERDUE = 0


async def in_flight(store: LightningStore, groups: int, step: int = 1) -> InFlight:
    made = InFlight(store)
    await made.enqueue([[EnqueueRolloutRequest(input={"task": number})] * 2 for number in range(groups)], step=step)
    return made


async def finish(store: LightningStore, group: Group) -> None:
    for rollout_id, status in zip(group.rollout_ids, ("succeeded", "failed"), strict=True):
        await store.update_rollout(rollout_id, status=status)


async def test_a_step_takes_the_first_whole_groups_and_leaves_the_others_running(store: LightningStore) -> None:
    running = await in_flight(store, 3)
    first, middle, last = running.groups
    await finish(store, last)
    await store.update_rollout(middle.rollout_ids[0], status="succeeded")
    assert await running.take(1, step=1, oldest_step=NONE_OVERDUE, timeout_seconds=HANG_SECONDS) == [last]
    assert list(last.finished) == last.rollout_ids and [r.status for r in last.finished.values()] == ["succeeded", "failed"]
    assert running.groups == [first, middle]
    await finish(store, first)
    await store.update_rollout(middle.rollout_ids[1], status="succeeded")
    assert await running.take(2, step=1, oldest_step=NONE_OVERDUE, timeout_seconds=HANG_SECONDS) == [first, middle]
    assert running.groups == []


async def test_a_group_that_has_grown_too_old_is_waited_for(store: LightningStore) -> None:
    running = await in_flight(store, 1, step=1)
    await running.enqueue([[EnqueueRolloutRequest(input={"task": "young"})] * 2], step=2)
    old, young = running.groups
    await finish(store, young)
    taking = asyncio.create_task(running.take(1, step=1, oldest_step=1, timeout_seconds=HANG_SECONDS))
    await store.update_rollout(old.rollout_ids[1], status="failed")
    assert not taking.done()
    await store.update_rollout(old.rollout_ids[0], status="succeeded")
    assert await taking == [old]
    assert running.groups == [young]


async def test_incomplete_groups_fill_the_step_when_the_time_is_up(store: LightningStore) -> None:
    running = await in_flight(store, 3)
    first, middle, last = running.groups
    await finish(store, last)
    await store.update_rollout(first.rollout_ids[1], status="succeeded")
    assert await running.take(2, step=1, oldest_step=NONE_OVERDUE, timeout_seconds=0.5) == [first, last]
    assert (list(first.finished), last.whole) == ([first.rollout_ids[1]], True)
    assert running.groups == [middle]
    late = await store.query_rollouts(rollout_id_in=[first.rollout_ids[0], *middle.rollout_ids])
    status = {rollout.rollout_id: rollout.status for rollout in late}
    assert status == {first.rollout_ids[0]: "cancelled", **dict.fromkeys(middle.rollout_ids, "queuing")}, "a carried group runs on"


async def test_rollouts_that_no_step_will_take_are_cancelled(store: LightningStore) -> None:
    running = await in_flight(store, 2)
    rollout_ids = [rollout_id for group in running.groups for rollout_id in group.rollout_ids]
    assert await running.cancel() == 4
    assert {rollout.status for rollout in await store.query_rollouts(rollout_id_in=rollout_ids)} == {"cancelled"}
    assert running.groups == []


async def test_a_resumed_run_continues_its_groups_and_retries_lost_rollouts(store: LightningStore) -> None:
    before = await in_flight(store, 2)
    whole, half = before.groups
    for rollout_id in (*whole.rollout_ids, half.rollout_ids[0]):
        await store.update_rollout(rollout_id, status="succeeded")
    await store.update_rollout(half.rollout_ids[1], status="cancelled")
    kept = [{"number": group.number, "step": group.step, "rollout_ids": list(group.rollout_ids)} for group in before.groups]

    after = InFlight(store)
    await after.restore(before.count, kept)
    (again,) = await store.query_rollouts(rollout_id_in=[half.rollout_ids[1]])
    assert again.status == "requeuing"
    await after.enqueue([[EnqueueRolloutRequest(input={"task": "new"})] * 2], step=2)
    assert [(group.number, group.step) for group in after.groups] == [(0, 1), (1, 1), (2, 2)]
    (taken,) = await after.take(1, step=1, oldest_step=NONE_OVERDUE, timeout_seconds=HANG_SECONDS)
    assert taken.number == 0 and {rollout.status for rollout in taken.finished.values()} == {"succeeded"}
    taking = asyncio.create_task(after.take(2, step=1, oldest_step=1, timeout_seconds=HANG_SECONDS))
    await finish(store, after.groups[1])
    await store.update_rollout(half.rollout_ids[1], status="succeeded")
    first, second = await taking
    assert (first.number, second.number, half.rollout_ids[1] in first.finished) == (1, 2, True)


async def test_a_rollout_that_waits_for_a_reward_keeps_its_group_back_and_failed_ones_do_not(store: LightningStore) -> None:
    running = InFlight(store, RewardWait(3600.0, store.rewarded))
    await running.enqueue([[EnqueueRolloutRequest(input={"task": number})] * 2 for number in range(2)], step=1)
    first, second = running.groups
    for group in (first, second):
        for rollout_id in group.rollout_ids:
            await store.start_attempt(rollout_id)
        await finish(store, group)
    await store.add_reward(1.0, rollout_id=second.rollout_ids[0])
    assert await running.take(1, step=1, oldest_step=NONE_OVERDUE, timeout_seconds=HANG_SECONDS) == [second]
    taking = asyncio.create_task(running.take(1, step=2, oldest_step=NONE_OVERDUE, timeout_seconds=HANG_SECONDS))
    await store.add_reward(0.0, rollout_id=first.rollout_ids[0])
    assert await taking == [first] and first.whole, "it is in the next step, once"


async def test_a_deleted_rollout_is_not_waited_for(store: LightningStore) -> None:
    running = InFlight(store, RewardWait(3600.0, store.rewarded))
    await running.enqueue([[EnqueueRolloutRequest(input={"task": 1})] * 2], step=1)
    (group,) = running.groups
    await store.queue.delete([group.rollout_ids[0]])
    await store.update_rollout(group.rollout_ids[1], status="failed")
    async with asyncio.timeout(HANG_SECONDS):
        assert await running.take(1, step=1, oldest_step=NONE_OVERDUE, timeout_seconds=100 * HANG_SECONDS) == [group]
    assert list(group.finished) == [group.rollout_ids[1]]


async def test_a_group_that_is_too_old_waits_for_no_reward(store: LightningStore) -> None:
    running = InFlight(store, RewardWait(3600.0, store.rewarded))
    await running.enqueue([[EnqueueRolloutRequest(input={"task": 1})] * 2], step=1)
    (old,) = running.groups
    await finish(store, old)
    async with asyncio.timeout(HANG_SECONDS):
        assert await running.take(1, step=3, oldest_step=1, timeout_seconds=100 * HANG_SECONDS) == [old]
    assert old.whole and not old.unrewarded


async def test_rewards_are_of_named_sources(store: LightningStore) -> None:
    begun = await store.start_rollout({"question": 1})
    await store.add_reward(1.0, rollout_id=begun.rollout_id, source="ann")
    asked = [None, ["ann", "bob"], ["bob"], ["agent"], ["runner"]]
    assert [bool(await store.rewarded([begun.rollout_id], sources)) for sources in asked] == [True, True, False, False, False]
    traces = await store.traces([begun.rollout_id])
    key = (begun.rollout_id, begun.attempt.attempt_id)
    assert [key in traces.trusting(sources).rewards for sources in asked] == [True, True, False, False, False]
    assert [reward.source for reward in traces.rewards[key]] == ["ann"]
