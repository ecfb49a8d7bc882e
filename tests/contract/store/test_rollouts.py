"""What 0.3's users rely on of rollouts and attempts, over a real stack."""

from __future__ import annotations

import asyncio
import time

import pytest

from agl_otel.store import UNSET, LightningStore
from agl_otel.types import AttemptedRollout, EnqueueRolloutRequest, RolloutConfig


async def drained(store: LightningStore) -> None:
    """Nothing is queued any more."""
    while await store.dequeue_many_rollouts(limit=64):
        pass


async def test_a_started_rollout_is_never_queued_and_has_a_first_attempt(store: LightningStore) -> None:
    await drained(store)
    rollout = await store.start_rollout({"q": 1}, mode="val", worker_id="w-start")
    assert (rollout.status, rollout.mode, rollout.metadata) == ("preparing", "val", {})
    assert (rollout.attempt.sequence_id, rollout.attempt.status, rollout.attempt.worker_id) == (1, "preparing", "w-start")
    assert await store.dequeue_rollout() is None
    worker = await store.get_worker_by_id("w-start")
    assert worker is not None and (worker.status, worker.current_rollout_id) == ("busy", rollout.rollout_id)


async def test_the_queue_is_first_in_first_out(store: LightningStore) -> None:
    await drained(store)
    first = await store.enqueue_rollout("a", "train", None, RolloutConfig(max_attempts=2), {"k": "v"})
    assert (first.status, first.input, first.config.max_attempts, first.metadata) == ("queuing", "a", 2, {"k": "v"})
    many = await store.enqueue_many_rollouts([EnqueueRolloutRequest(input="b"), EnqueueRolloutRequest(input="c")])
    claimed = await store.dequeue_rollout("w-fifo")
    assert claimed is not None and claimed.rollout_id == first.rollout_id and claimed.attempt.worker_id == "w-fifo"
    assert [r.rollout_id for r in await store.dequeue_many_rollouts(limit=5)] == [r.rollout_id for r in many]
    assert await store.dequeue_many_rollouts(limit=0) == []


async def test_an_attempt_by_hand_is_not_counted_against_max_attempts(store: LightningStore, begun: AttemptedRollout) -> None:
    again = await store.start_attempt(begun.rollout_id, "w-hand")
    assert (again.status, again.attempt.sequence_id) == ("preparing", 2)
    assert [a.sequence_id for a in await store.query_attempts(begun.rollout_id)] == [1, 2]
    assert [a.sequence_id for a in await store.query_attempts(begun.rollout_id, sort_order="desc", limit=1)] == [2]
    assert await store.get_latest_attempt(begun.rollout_id) == again.attempt


async def test_rollouts_are_found_by_status_id_and_part_of_the_id(store: LightningStore) -> None:
    made = await store.enqueue(["x", "y", "z"])
    ids = [rollout.rollout_id for rollout in made]
    page = await store.query_rollouts(rollout_id_in=ids, sort_by="rollout_id", sort_order="desc", limit=2, offset=0)
    assert ([r.rollout_id for r in page], page.total, page.limit) == (sorted(ids, reverse=True)[:2], 3, 2)
    assert [r.rollout_id for r in await store.query_rollouts(ids[:1])] == ids[:1]  # an older, positional form
    assert [r.rollout_id for r in await store.query_rollouts(status=["queuing"], rollout_ids=ids)] == ids
    assert [r.rollout_id for r in await store.query_rollouts(rollout_id_contains=ids[1][4:])] == [ids[1]]
    either = await store.query_rollouts(rollout_id_in=[ids[0]], rollout_id_contains=ids[2][3:], filter_logic="or")
    assert {r.rollout_id for r in either} == {ids[0], ids[2]}
    assert list(await store.query_rollouts(rollout_id_in=[])) == []


async def test_a_rollout_that_was_attempted_carries_its_latest_attempt(store: LightningStore, begun: AttemptedRollout) -> None:
    again = await store.start_attempt(begun.rollout_id)
    found = await store.get_rollout_by_id(begun.rollout_id)
    assert isinstance(found, AttemptedRollout) and found.attempt.attempt_id == again.attempt.attempt_id
    queued = (await store.enqueue(["not yet"]))[0]
    assert not isinstance(await store.get_rollout_by_id(queued.rollout_id), AttemptedRollout)


async def test_unknown_ids_return_none_or_empty_and_cannot_be_changed(store: LightningStore, begun: AttemptedRollout) -> None:
    assert await store.get_rollout_by_id("ro-none") is None
    assert await store.get_latest_attempt("ro-none") is None
    assert list(await store.query_attempts("ro-none")) == []
    for wrong in (
        store.start_attempt("ro-none"),
        store.update_rollout("ro-none", status="failed"),
        store.update_attempt("ro-none", "latest", status="failed"),
        store.update_attempt(begun.rollout_id, "at-none", status="failed"),
        store.update_attempt((await store.enqueue(["no attempt"]))[0].rollout_id, "latest", status="failed"),
        store.update_attempt(begun.rollout_id, "latest", status="done"),  # type: ignore[arg-type]  # what untyped callers do
    ):
        with pytest.raises(ValueError, match=r"ro-none|at-none|attempt|done"):
            await wrong


async def test_an_update_changes_what_is_given_and_none_is_a_value(store: LightningStore) -> None:
    rollout = await store.start_rollout("in", mode="train", metadata={"a": 1})
    same = await store.update_rollout(rollout.rollout_id, UNSET)
    assert (same.input, same.mode, same.metadata) == ("in", "train", {"a": 1})
    changed = await store.update_rollout(rollout.rollout_id, input=None, mode=None, config=RolloutConfig(max_attempts=3), metadata={"b": 2})
    assert (changed.input, changed.mode, changed.config.max_attempts, changed.metadata) == (None, None, 3, {"b": 2})
    assert changed.end_time is None and changed.status == "preparing"
    ended = await store.update_rollout(rollout.rollout_id, status="cancelled", metadata=None)
    assert ended.end_time is not None and not ended.metadata
    attempt = await store.get_latest_attempt(rollout.rollout_id)
    assert attempt is not None and attempt.status == "preparing"  # cancelling leaves the attempt as it is


async def test_an_attempts_end_reaches_its_rollout_and_its_worker(store: LightningStore) -> None:
    rollout = await store.start_rollout("in", worker_id="w-end")
    attempt = await store.update_attempt(rollout.rollout_id, "latest", status="succeeded", metadata={"m": 1})
    assert attempt.end_time is not None and attempt.metadata == {"m": 1}
    found = await store.get_rollout_by_id(rollout.rollout_id)
    assert found is not None and found.status == "succeeded"
    worker = await store.get_worker_by_id("w-end")
    assert worker is not None and (worker.status, worker.current_attempt_id) == ("idle", None)
    beat = await store.update_attempt(rollout.rollout_id, attempt.attempt_id, last_heartbeat_time=12.5, worker_id="w-other")
    assert (beat.last_heartbeat_time, beat.worker_id, beat.status) == (12.5, "w-other", "succeeded")


async def test_a_failure_is_tried_again_where_the_config_says_so(store: LightningStore) -> None:
    await drained(store)
    config = RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout = await store.start_rollout("in", config=config)
    for expected in ("requeuing", "failed"):
        await store.update_attempt(rollout.rollout_id, "latest", status="failed")
        found = await store.get_rollout_by_id(rollout.rollout_id)
        assert found is not None and found.status == expected
        if expected == "requeuing":
            claimed = await store.dequeue_rollout()
            assert claimed is not None and (claimed.rollout_id, claimed.attempt.sequence_id) == (rollout.rollout_id, 2)


async def test_only_the_latest_attempt_changes_its_rollout(store: LightningStore, begun: AttemptedRollout) -> None:
    await store.start_attempt(begun.rollout_id)
    await store.update_attempt(begun.rollout_id, begun.attempt.attempt_id, status="failed")
    found = await store.get_rollout_by_id(begun.rollout_id)
    assert found is not None and found.status == "preparing"


async def test_waiting_gives_the_finished_in_the_order_asked_for(store: LightningStore) -> None:
    first, second, third = await store.enqueue(["1", "2", "3"])
    ids = [third.rollout_id, "ro-none", first.rollout_id, second.rollout_id]
    assert await store.wait_for_rollouts(ids, 0) == []
    for rollout in (first, third):
        await store.update_rollout(rollout.rollout_id, status="succeeded")
    done = await store.wait_for_rollouts(rollout_ids=ids, timeout=0)
    assert [rollout.rollout_id for rollout in done] == [third.rollout_id, first.rollout_id]
    started = time.monotonic()
    waiting = asyncio.ensure_future(store.wait_for_rollouts(ids))
    await store.update_rollout(second.rollout_id, status="failed")
    assert [r.rollout_id for r in await waiting] == [third.rollout_id, first.rollout_id, second.rollout_id]
    assert time.monotonic() - started < 25  # it is notified; it does not poll


async def test_rollouts_can_be_watched_as_they_finish(store: LightningStore) -> None:
    first, second = await store.enqueue(["1", "2"])
    await store.update_rollout(second.rollout_id, status="succeeded")
    seen: list[str] = []
    async for rollout in store.watch([first.rollout_id, second.rollout_id], timeout_seconds=300):
        seen.append(rollout.rollout_id)
        await store.update_rollout(first.rollout_id, status="failed")
    assert seen == [second.rollout_id, first.rollout_id]
