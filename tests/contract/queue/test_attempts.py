"""Changes of attempts and the resulting changes of rollouts and workers; fencing; the watchdog; waiting."""

from __future__ import annotations

import asyncio

import pytest

from agl_otel.errors import FencedError, NotFoundError, UsageError
from agl_otel.queue.calls import Calls
from agl_otel.queue.client import AttemptUpdate, Observation, RolloutUpdate, Witness
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.types import (
    Attempt,
    AttemptedRollout,
    AttemptLedger,
    AttemptStatus,
    EnqueueRolloutRequest,
    ProcessRecord,
    Rollout,
    RolloutConfig,
    RolloutStatus,
)
from tests.local_queue import LocalQueue


async def claimed(queue: LocalQueue, config: RolloutConfig | None = None, worker_id: str = "w") -> AttemptedRollout:
    await queue.client.enqueue([EnqueueRolloutRequest(input="task", config=config)])
    [claim] = await queue.client.claim(worker_id=worker_id)
    return claim


async def report(queue: LocalQueue, claim: AttemptedRollout, status: AttemptStatus, *, token: str | None = None) -> Attempt:
    update = AttemptUpdate(rollout_id=claim.rollout_id, attempt_id=claim.attempt.attempt_id, status=status, token=token)
    [attempt] = await queue.client.update_attempts([update])
    return attempt


async def now(queue: LocalQueue, rollout_id: str) -> AttemptedRollout:
    [rollout] = await queue.client.query_rollouts(rollout_id_in=[rollout_id])
    assert isinstance(rollout, AttemptedRollout)
    return rollout


async def span(queue: LocalQueue, claim: AttemptedRollout, spans: int = 1) -> None:
    await queue.client.observe([Observation(claim.rollout_id, claim.attempt.attempt_id, spans, queue.clock.now)])


async def test_a_success_ends_the_attempt_and_rollout_and_frees_the_worker(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    queue.clock.advance(5)
    attempt = await report(queue, claim, "succeeded", token=claim.token)
    assert (attempt.status, attempt.end_time) == ("succeeded", queue.clock.now)
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.end_time, rollout.reason) == ("succeeded", queue.clock.now, None)
    [worker] = await queue.client.query_workers()
    assert (worker.status, worker.last_idle_time, worker.current_rollout_id) == ("idle", queue.clock.now, None)


async def test_seals_and_errors_are_stored_with_the_attempt(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    update = AttemptUpdate(rollout_id=claim.rollout_id, attempt_id="latest", status="failed", seals={"m1": 3, "m2": 0}, error="exit code 3")
    await queue.client.update_attempts([update])
    [attempt] = await queue.client.query_attempts([claim.rollout_id])
    assert (attempt.seals, attempt.error) == ({"m1": 3, "m2": 0}, "exit code 3")
    assert (await now(queue, claim.rollout_id)).reason == "exit code 3"


async def test_a_ledger_is_stored_with_the_attempt_even_after_its_end(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    await report(queue, claim, "succeeded", token=claim.token)
    record = ProcessRecord(pid=7, command="python agent.py", marker="m1", begun=3, ended=2, abandoned=1, closed=True)
    ledger = AttemptLedger(reach="hooked", command="python agent.py", processes=[record])
    await queue.client.update_attempts([AttemptUpdate(rollout_id=claim.rollout_id, attempt_id="latest", ledger=ledger)])
    [attempt] = await queue.client.query_attempts([claim.rollout_id])
    assert (attempt.status, attempt.ledger) == ("succeeded", ledger)


async def test_proxies_that_forward_calls_are_stored_with_the_attempt(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    key = (claim.rollout_id, claim.attempt.attempt_id)
    await queue.client.witness([Witness(*key, "m1", "http://a:1"), Witness("ro-unknown", "at-unknown", "m9", "")])
    await queue.client.witness([Witness(*key, "m2", "http://b:1"), Witness(*key, "m1", "http://a:1")])
    await report(queue, claim, "succeeded", token=claim.token)
    [attempt] = await queue.client.query_attempts([claim.rollout_id])
    assert attempt.proxies == {"m1": "http://a:1", "m2": "http://b:1"}


async def test_a_failure_in_the_retry_condition_goes_to_the_end_of_the_queue(queue: LocalQueue) -> None:
    claim = await claimed(queue, RolloutConfig(max_attempts=2, retry_condition=["failed"]))
    await queue.client.enqueue([EnqueueRolloutRequest(input="other")])
    await report(queue, claim, "failed")
    assert (await now(queue, claim.rollout_id)).status == "requeuing"
    other, again = await queue.client.claim(2)
    assert (other.input, again.rollout_id, again.attempt.sequence_id) == ("other", claim.rollout_id, 2)
    await report(queue, again, "failed")
    assert (await now(queue, claim.rollout_id)).status == "failed"


async def test_an_older_attempt_changes_alone(queue: LocalQueue) -> None:
    first = await claimed(queue)
    [second] = await queue.client.start_attempt([first.rollout_id])
    await report(queue, first, "succeeded")
    await span(queue, first)
    rollout = await now(queue, first.rollout_id)
    assert (rollout.status, rollout.attempt.attempt_id) == ("preparing", second.attempt.attempt_id)


async def test_a_call_with_the_token_of_a_replaced_attempt_is_refused(queue: LocalQueue) -> None:
    first = await claimed(queue)
    [second] = await queue.client.start_attempt([first.rollout_id])
    with pytest.raises(FencedError, match=f"{first.attempt.attempt_id} of rollout {first.rollout_id} was replaced by a newer attempt"):
        await report(queue, first, "succeeded", token=first.token)
    await report(queue, second, "succeeded", token=second.token)
    assert (await now(queue, first.rollout_id)).status == "succeeded"


async def test_a_call_with_a_token_is_refused_after_a_cancellation_and_one_without_is_not(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    await queue.client.update_rollouts([RolloutUpdate(rollout_id=claim.rollout_id, status="cancelled")])
    assert (await now(queue, claim.rollout_id)).attempt.status == "preparing"
    with pytest.raises(FencedError, match="was cancelled"):
        await report(queue, claim, "succeeded", token=claim.token)
    assert (await now(queue, claim.rollout_id)).status == "cancelled"
    await report(queue, claim, "succeeded")
    assert (await now(queue, claim.rollout_id)).status == "succeeded"


async def test_a_token_of_another_claim_is_refused(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    with pytest.raises(FencedError, match="only its claimer"):
        await report(queue, claim, "succeeded", token="guess")


async def test_updates_of_one_call_are_all_or_nothing(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    updates = [
        AttemptUpdate(rollout_id=claim.rollout_id, attempt_id="latest", status="succeeded"),
        AttemptUpdate(rollout_id="ro-none", attempt_id="latest", status="succeeded"),
    ]
    with pytest.raises(NotFoundError, match="ro-none"):
        await queue.client.update_attempts(updates)
    assert (await now(queue, claim.rollout_id)).status == "preparing"


async def test_reports_are_independent(queue: LocalQueue) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=i) for i in range(3)])
    claims = await queue.client.claim(3)
    await queue.client.update_rollouts([RolloutUpdate(rollout_id=claims[1].rollout_id, status="cancelled")])
    updates = [
        *(AttemptUpdate(rollout_id=c.rollout_id, attempt_id=c.attempt.attempt_id, token=c.token, status="succeeded") for c in claims),
        AttemptUpdate(rollout_id="ro-none", attempt_id="latest", status="succeeded"),
    ]
    fine, fenced, also_fine, unknown = await queue.client.report(updates)
    assert (fine, also_fine) == (None, None)
    assert isinstance(fenced, FencedError)
    assert isinstance(unknown, NotFoundError)
    assert [r.status for r in await queue.client.query_rollouts()] == ["succeeded", "cancelled", "succeeded"]


async def test_what_does_not_exist_is_named(queue: LocalQueue) -> None:
    [rollout] = await queue.client.enqueue([EnqueueRolloutRequest(input=1)])
    with pytest.raises(NotFoundError, match="has no attempt yet"):
        await queue.client.update_attempts([AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id="latest", status="failed")])
    with pytest.raises(NotFoundError, match="has no attempt 'at-none'"):
        await queue.client.update_attempts([AttemptUpdate(rollout_id=rollout.rollout_id, attempt_id="at-none", status="failed")])
    with pytest.raises(NotFoundError, match="no rollout 'ro-none'"):
        await queue.client.update_rollouts([RolloutUpdate(rollout_id="ro-none", status="cancelled")])


async def test_an_unknown_status_is_refused_with_the_valid_ones(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    with pytest.raises(UsageError, match=r"no attempt status 'done': use one of .*succeeded"):
        await report(queue, claim, "done")  # pyright: ignore[reportArgumentType] - the point of the test
    update = RolloutUpdate(rollout_id=claim.rollout_id, status="done")  # pyright: ignore[reportArgumentType] - the point of the test
    with pytest.raises(UsageError, match=r"no rollout status 'done'"):
        await queue.client.update_rollouts([update])


async def test_fields_of_a_rollout_can_be_changed_and_cleared(queue: LocalQueue) -> None:
    [rollout] = await queue.client.enqueue([EnqueueRolloutRequest(input=1, mode="train", metadata={"a": 1})])
    change = RolloutUpdate(rollout_id=rollout.rollout_id, input=None, metadata={"b": 2}, config=RolloutConfig(max_attempts=4), priority=7)
    [changed] = await queue.client.update_rollouts([change])
    assert (changed.input, changed.mode, changed.metadata, changed.config.max_attempts, changed.priority) == (None, "train", {"b": 2}, 4, 7)
    [cleared] = await queue.client.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, clear=["mode", "metadata"])])
    assert (cleared.mode, cleared.metadata, cleared.status) == (None, None, "queuing")


async def test_a_rollout_taken_out_of_the_queue_by_hand_is_not_claimed(queue: LocalQueue) -> None:
    [rollout] = await queue.client.enqueue([EnqueueRolloutRequest(input=1)])
    await queue.client.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])
    assert await queue.client.claim() == []


async def test_a_rollout_put_into_the_queue_twice_is_claimed_once(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    for _ in range(2):
        await queue.client.update_rollouts([RolloutUpdate(rollout_id=claim.rollout_id, status="requeuing")])
    assert len(await queue.client.claim(5)) == 1


async def test_a_span_makes_it_run_and_a_heartbeat_alone_does_not(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    await span(queue, claim, spans=0)
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.attempt.status, rollout.attempt.last_heartbeat_time) == ("preparing", "preparing", queue.clock.now)
    await span(queue, claim)
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.attempt.status) == ("running", "running")


async def test_a_late_span_does_not_reopen_a_finished_rollout(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    await report(queue, claim, "succeeded")
    queue.clock.advance(3)
    await span(queue, claim)
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.attempt.status, rollout.attempt.last_heartbeat_time) == ("succeeded", "succeeded", queue.clock.now)


async def test_an_old_or_future_time_of_receipt_never_fakes_a_heartbeat(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    key = (claim.rollout_id, claim.attempt.attempt_id)
    await queue.client.observe([Observation(*key, 1, queue.clock.now + 500)])
    assert (await now(queue, claim.rollout_id)).attempt.last_heartbeat_time == queue.clock.now
    await queue.client.observe([Observation(*key, 1, queue.clock.now - 500)])
    assert (await now(queue, claim.rollout_id)).attempt.last_heartbeat_time == queue.clock.now


async def test_spans_of_unknown_rollouts_are_no_error(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    await queue.client.observe([Observation("ro-none", "at-none", 1, 1.0), Observation("ro-none", claim.attempt.attempt_id, 1, 1.0)])
    assert (await now(queue, claim.rollout_id)).status == "preparing"


async def test_an_overdue_attempt_times_out_with_its_reason(queue: LocalQueue) -> None:
    claim = await claimed(queue, RolloutConfig(timeout_seconds=10))
    assert await queue.sweep(after=10) == 0
    assert await queue.sweep(after=0.5) == 1
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.attempt.status, rollout.attempt.end_time) == ("failed", "timeout", None)
    assert rollout.reason == f"attempt {claim.attempt.attempt_id} (1 of 1) ran longer than 10 s"
    [worker] = await queue.client.query_workers()
    assert worker.status == "unknown"
    assert await queue.client.heartbeat("w", attempt_ids=[claim.attempt.attempt_id]) == [claim.attempt.attempt_id]


async def test_a_silent_attempt_is_requeued_and_a_span_revives_it(queue: LocalQueue) -> None:
    claim = await claimed(queue, RolloutConfig(unresponsive_seconds=10, max_attempts=2, retry_condition=["unresponsive"]))
    await queue.sweep(after=11)
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.attempt.status) == ("requeuing", "unresponsive")
    await span(queue, claim)
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.attempt.status) == ("running", "running")
    assert await queue.client.claim() == []


@pytest.mark.parametrize("status", ["failed", "timeout"])
async def test_a_late_span_of_an_ended_attempt_leaves_its_requeued_rollout_in_the_queue(queue: LocalQueue, status: AttemptStatus) -> None:
    claim = await claimed(queue, RolloutConfig(max_attempts=2, retry_condition=["failed", "timeout"]))
    await report(queue, claim, status)
    await span(queue, claim)
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.attempt.status) == ("requeuing", status)
    assert [again.attempt.sequence_id for again in await queue.client.claim()] == [2]


async def test_a_late_span_of_a_cancelled_attempt_leaves_a_requeued_rollout_in_the_queue(queue: LocalQueue) -> None:
    claim = await claimed(queue)
    await span(queue, claim)
    statuses: list[RolloutStatus] = ["cancelled", "requeuing"]
    for status in statuses:
        await queue.client.update_rollouts([RolloutUpdate(rollout_id=claim.rollout_id, status=status)])
    await span(queue, claim)
    assert (await now(queue, claim.rollout_id)).status == "requeuing"
    assert [again.attempt.sequence_id for again in await queue.client.claim()] == [2]


async def test_a_replaced_attempt_whose_frozen_runner_comes_back_stays_ended(queue: LocalQueue) -> None:
    frozen = await claimed(queue, RolloutConfig(unresponsive_seconds=10, max_attempts=3, retry_condition=["unresponsive"]), "frozen")
    await span(queue, frozen)
    await queue.sweep(after=11)
    [second] = await queue.client.claim(worker_id="other")
    assert second.rollout_id == frozen.rollout_id
    await span(queue, frozen)  # it goes on, and its collector hears of it
    attempt_id = frozen.attempt.attempt_id
    assert await queue.client.heartbeat("frozen", attempt_ids=[attempt_id]) == [attempt_id]
    with pytest.raises(FencedError, match="was replaced by a newer attempt"):
        await report(queue, frozen, "succeeded", token=frozen.token)
    [first] = await queue.client.query_attempts([frozen.rollout_id], limit=1)
    assert (first.attempt_id, first.status) == (attempt_id, "unresponsive")
    workers = {worker.worker_id: worker.status for worker in await queue.client.query_workers()}
    assert workers == {"frozen": "unknown", "other": "busy"}
    await report(queue, second, "succeeded", token=second.token)
    assert (await now(queue, frozen.rollout_id)).status == "succeeded"


async def test_an_open_attempt_that_is_replaced_by_hand_ends(queue: LocalQueue) -> None:
    first = await claimed(queue, worker_id="first")
    await span(queue, first)
    queue.clock.advance(5)
    await queue.client.start_attempt([first.rollout_id])
    await span(queue, first)
    [replaced, _] = await queue.client.query_attempts([first.rollout_id])
    assert (replaced.status, replaced.end_time, replaced.error) == ("failed", queue.clock.now, "it was replaced by a newer attempt")
    assert (await now(queue, first.rollout_id)).status == "preparing"


async def test_a_heartbeat_keeps_an_attempt_alive(queue: LocalQueue) -> None:
    claim = await claimed(queue, RolloutConfig(unresponsive_seconds=10))
    queue.clock.advance(8)
    await span(queue, claim, spans=0)
    assert await queue.sweep(after=8) == 0
    assert await queue.sweep(after=8) == 1


async def test_a_heartbeat_of_its_worker_keeps_a_silent_attempt_alive(queue: LocalQueue) -> None:
    claim = await claimed(queue, RolloutConfig(unresponsive_seconds=10))
    queue.clock.advance(8)
    await queue.client.heartbeat("w", attempt_ids=[claim.attempt.attempt_id])
    rollout = await now(queue, claim.rollout_id)
    assert (rollout.status, rollout.attempt.status, rollout.attempt.last_heartbeat_time) == ("preparing", "preparing", queue.clock.now)
    assert await queue.sweep(after=8) == 0
    assert await queue.sweep(after=8) == 1


async def test_a_heartbeat_names_the_attempts_to_end(queue: LocalQueue) -> None:
    runs, cancelled, replaced = [await claimed(queue) for _ in range(3)]
    await queue.client.update_rollouts([RolloutUpdate(rollout_id=cancelled.rollout_id, status="cancelled")])
    await queue.client.start_attempt([replaced.rollout_id])
    ids = [c.attempt.attempt_id for c in (runs, cancelled, replaced)]
    assert await queue.client.heartbeat("w", stats={"cpu": 0.5}, attempt_ids=[*ids, "at-deleted"]) == [*ids[1:], "at-deleted"]
    [worker] = await queue.client.query_workers()
    assert (worker.heartbeat_stats, worker.last_heartbeat_time) == ({"cpu": 0.5}, queue.clock.now)


async def test_a_worker_that_only_heartbeats_is_unknown(queue: LocalQueue) -> None:
    await queue.client.heartbeat("w")
    [worker] = await queue.client.query_workers()
    assert worker.status == "unknown"


async def waited(queue: LocalQueue, ids: list[str], timeout_seconds: float | None = None) -> list[Rollout]:
    return [rollout async for batch in queue.client.wait(ids, timeout_seconds=timeout_seconds) for rollout in batch]


async def test_wait_yields_rollouts_as_they_finish_and_ends(queue: LocalQueue) -> None:
    first, second, third = [await claimed(queue) for _ in range(3)]
    await report(queue, first, "succeeded")
    ids = [first.rollout_id, "ro-unknown", second.rollout_id, third.rollout_id]
    batches = queue.client.wait(ids)
    async with asyncio.timeout(300):
        assert [r.rollout_id for r in await anext(batches)] == [first.rollout_id]
        await report(queue, second, "failed")
        assert [(r.rollout_id, r.status) for r in await anext(batches)] == [(second.rollout_id, "failed")]
        await queue.client.delete([third.rollout_id])
        assert [batch async for batch in batches] == []


async def test_wait_without_time_checks_once(queue: LocalQueue) -> None:
    done, open_one = [await claimed(queue) for _ in range(2)]
    await report(queue, done, "succeeded")
    assert [r.rollout_id for r in await waited(queue, [open_one.rollout_id, done.rollout_id], 0)] == [done.rollout_id]
    assert await waited(queue, [open_one.rollout_id], 0.05) == []
    assert await waited(queue, []) == []


async def test_a_heartbeat_counts_by_its_age_whatever_the_senders_clock_says(queue: LocalQueue) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=1, config=RolloutConfig(unresponsive_seconds=30))])
    [claim] = await queue.client.claim(1)
    queue.clock.advance(20)
    await queue.client.observe([Observation(claim.rollout_id, claim.attempt.attempt_id, 1, 995.0)], sent_at=1000.0)
    [attempt] = await queue.client.query_attempts([claim.rollout_id])
    assert attempt.last_heartbeat_time == queue.clock.now - 5
    assert await queue.sweep(after=24) == 0
    assert await queue.sweep(after=2) == 1


async def test_a_ledger_that_is_none_is_refused_in_one_line(queue: LocalQueue) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=1)])
    [claim] = await queue.client.claim()
    update = pb.AttemptUpdate(rollout_id=claim.rollout_id, attempt_id="latest", ledger_json='{"nonsense": 1}')
    calls = Calls(queue.client.address, token="", timeout_seconds=300, retry_seconds=60)
    with pytest.raises(UsageError, match="this is no ledger of an attempt: reach: Field required; nonsense: Extra") as refused:
        await calls.call("UpdateAttempts", pb.UpdateAttemptsRequest(updates=[update], request_id="r"), pb.Attempts)
    await calls.close()
    assert "\n" not in str(refused.value) and "pydantic" not in str(refused.value)
