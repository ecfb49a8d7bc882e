"""Rollouts enter the queue and leave it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agl_otel.errors import ConflictError, InvalidIdError, NotFoundError, UsageError
from agl_otel.queue.calls import Calls, new_request_id
from agl_otel.queue.client import AttemptUpdate, Observation, QueueClient, RolloutUpdate
from agl_otel.queue.engine import Signals, Transaction
from agl_otel.queue.operations.claim import admits
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.types import LLM, RUN_LABEL, AttemptedRollout, EnqueueRolloutRequest, RolloutConfig, RolloutMode
from tests.local_queue import LocalQueue


def tasks(*inputs: object) -> list[EnqueueRolloutRequest]:
    return [EnqueueRolloutRequest(input=value) for value in inputs]


async def until_waiting(queue: LocalQueue, claims: int) -> None:
    async with asyncio.timeout(300):
        while queue.server.service.claims_waiting != claims:  # noqa: ASYNC110 - in one loop with the service: a turn each
            await asyncio.sleep(0)


async def until_idle(queue: LocalQueue, claims: int) -> None:
    """Wait until claims have found nothing and are idle."""
    async with asyncio.timeout(300):
        while queue.server.service.claims_idle != claims:  # noqa: ASYNC110 - in one loop with the service: a turn each
            await asyncio.sleep(0)


async def test_a_rollout_starts_as_in_agent_lightning(queue: LocalQueue) -> None:
    [rollout] = await queue.client.enqueue(tasks({"question": "1+1"}))
    assert rollout.status == "queuing"
    assert rollout.start_time == queue.clock.now
    assert (rollout.end_time, rollout.mode, rollout.resources_id, rollout.config, rollout.metadata) == (
        None,
        None,
        None,
        RolloutConfig(),
        {},
    )


async def test_rollouts_are_claimed_in_the_order_of_their_enqueue(queue: LocalQueue) -> None:
    await queue.client.enqueue(tasks(1, 2))
    await queue.client.enqueue(tasks(3))
    claimed = await queue.client.claim(2)
    assert [c.input for c in claimed] == [1, 2]
    assert [(c.status, c.attempt.status, c.attempt.sequence_id) for c in claimed] == [("preparing", "preparing", 1)] * 2
    assert [c.input for c in await queue.client.claim(5)] == [3]
    assert await queue.client.claim(5) == []


async def test_a_higher_priority_is_claimed_first(queue: LocalQueue) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input=p, priority=p) for p in (0, 2, -1, 2)])
    assert [c.input for c in await queue.client.claim(4)] == [2, 2, 0, -1]


async def test_a_rollout_is_not_claimed_before_its_time(queue: LocalQueue) -> None:
    await queue.client.enqueue([EnqueueRolloutRequest(input="later", not_before=queue.clock.now + 10), *tasks("now")])
    assert [c.input for c in await queue.client.claim(2)] == ["now"]
    queue.clock.advance(10)
    assert [c.input for c in await queue.client.claim(2)] == ["later"]


@pytest.mark.parametrize("modes", [(), ("train",), ("val", "test")])
@pytest.mark.parametrize("labels", [{}, {"gpu": "a"}, {RUN_LABEL: "mine"}, {RUN_LABEL: "mine", "gpu": "a"}, {"gpu": "b"}])
async def test_an_enqueue_serves_the_waiting_claims_whose_filter_admits_it(
    queue: LocalQueue, modes: tuple[RolloutMode, ...], labels: dict[str, str]
) -> None:
    """What `admits` says of a new rollout is what the query of a claim finds."""
    kinds: list[dict[str, str]] = [{}, {"gpu": "a"}, {RUN_LABEL: "mine"}, {RUN_LABEL: "other", "gpu": "a"}, {RUN_LABEL: "mine", "gpu": "a"}]
    for mode in (None, "train", "val"):
        for given in kinds:
            claiming = asyncio.create_task(queue.client.claim(1, wait_seconds=300, modes=modes, labels=labels))
            await until_idle(queue, 1)
            request = pb.ClaimRequest(modes=modes, labels=labels)
            expected = admits(request, pb.NewRollout(mode=mode, labels=given))
            [rollout] = await queue.client.enqueue([EnqueueRolloutRequest(input=1, mode=mode, labels=given)])
            if not expected:
                assert await queue.client.claim(1, modes=modes, labels=labels) == []
                await queue.client.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="cancelled")])
                claiming.cancel()
                await asyncio.gather(claiming, return_exceptions=True)
            else:
                assert [claim.rollout_id for claim in await claiming] == [rollout.rollout_id]
            await until_waiting(queue, 0)


async def test_only_rollouts_of_the_asked_mode_and_labels_are_claimed(queue: LocalQueue) -> None:
    requests = [
        EnqueueRolloutRequest(input="plain"),
        EnqueueRolloutRequest(input="val", mode="val"),
        EnqueueRolloutRequest(input="gpu", mode="train", labels={"gpu": "a100", "zone": "eu"}),
    ]
    await queue.client.enqueue(requests)
    assert await queue.client.claim(3, modes=["test"]) == []
    assert await queue.client.claim(3, labels={"gpu": "h200"}) == []
    assert [c.input for c in await queue.client.claim(3, labels={"gpu": "a100"})] == ["gpu"]
    assert [c.input for c in await queue.client.claim(3, modes=["val", "test"])] == ["val"]
    assert [c.input for c in await queue.client.claim(3)] == ["plain"]


async def test_runners_of_a_run_take_its_rollouts_and_those_of_no_run(queue: LocalQueue) -> None:
    labels: list[dict[str, str] | None] = [{RUN_LABEL: "other"}, None, {"gpu": "a100"}, {RUN_LABEL: "mine", "gpu": "a100"}]
    await queue.client.enqueue([EnqueueRolloutRequest(input=place, labels=each) for place, each in enumerate(labels)])
    assert [c.input for c in await queue.client.claim(4, labels={RUN_LABEL: "mine", "gpu": "a100"})] == [2, 3]
    assert [c.input for c in await queue.client.claim(4, labels={RUN_LABEL: "mine"})] == [1]
    assert [c.input for c in await queue.client.claim(4)] == [0], "a runner without labels takes any"


async def test_a_limit_of_zero_claims_nothing(queue: LocalQueue) -> None:
    await queue.client.enqueue(tasks(1))
    assert await queue.client.claim(0, wait_seconds=5) == []


async def test_a_waiting_claim_gets_a_new_rollout_at_once(queue: LocalQueue) -> None:
    claim = asyncio.create_task(queue.client.claim(wait_seconds=300))
    await until_waiting(queue, 1)
    await queue.client.enqueue(tasks("x"))
    assert [c.input for c in await claim] == ["x"]


async def test_waiting_claims_are_served_in_the_transaction_of_the_enqueue(queue: LocalQueue) -> None:
    received: list[Signals] = []
    waiting = [asyncio.create_task(queue.client.claim(2, worker_id=f"w-{n}", wait_seconds=30)) for n in range(3)]
    await until_idle(queue, 3)
    queue.engine.subscribe(received.append)
    enqueued = await queue.client.enqueue(tasks(1, 2, 3))
    assert not sum(signals.claimable for signals in received), "nothing is left that could be claimed: no other claim is woken"
    assert [r.status for r in enqueued] == ["queuing"] * 3, "the answer tells what was enqueued"
    assert [r.status for r in await queue.client.query_rollouts()] == ["preparing"] * 3
    await until_waiting(queue, 1)
    await queue.client.enqueue(tasks(4))
    assert sorted([c.input for c in claimed] for claimed in await asyncio.gather(*waiting)) == [[1, 2], [3], [4]]


async def test_a_claim_refused_by_the_database_does_not_fail_the_enqueue(queue: LocalQueue) -> None:
    calls = Calls(queue.client.address, token="", timeout_seconds=300, retry_seconds=0)
    spoiled = asyncio.create_task(calls.call("Claim", pb.ClaimRequest(limit=1, worker_id="a\0b", wait_seconds=60), pb.Rollouts))
    await until_idle(queue, 1)
    [rollout] = await queue.client.enqueue(tasks("x"))  # PostgreSQL takes no such text
    [result] = await asyncio.gather(spoiled, return_exceptions=True)
    claimed = result.rollouts if isinstance(result, pb.Rollouts) else await queue.client.claim(wait_seconds=5)
    assert [c.rollout_id for c in claimed] == [rollout.rollout_id]
    await calls.close()


async def test_a_claimer_that_disconnects_while_being_served_strands_no_rollout(queue: LocalQueue) -> None:
    begun, over = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(_: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        over.wait()
        raise UsageError("nothing has happened")

    client = QueueClient(queue.client.address)
    disconnected = asyncio.create_task(client.claim(wait_seconds=30))
    await until_idle(queue, 1)
    first = queue.engine.write(hold)  # until this ends SQLite commits nothing else
    await begun.wait()
    enqueuing = asyncio.create_task(queue.client.enqueue(tasks("x")))
    async with asyncio.timeout(300):
        while queue.server.service.claims_idle:  # noqa: ASYNC110 - in one loop with the service: a turn each
            await asyncio.sleep(0)
    disconnected.cancel()
    await until_waiting(queue, 0)
    over.set()
    with pytest.raises(UsageError, match="nothing has happened"):
        await first
    await enqueuing
    await asyncio.gather(disconnected, return_exceptions=True)
    await client.close()
    await queue.server.service.drain()
    assert [(c.input, c.attempt.sequence_id) for c in await queue.client.claim(wait_seconds=5)] == [("x", 1)]


async def test_a_waiting_claim_gets_a_requeued_or_newly_due_rollout(queue: LocalQueue) -> None:
    [rollout] = await queue.client.enqueue(tasks("again"))
    await queue.client.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="failed")])
    claim = asyncio.create_task(queue.client.claim(wait_seconds=30))
    await until_waiting(queue, 1)
    await queue.client.update_rollouts([RolloutUpdate(rollout_id=rollout.rollout_id, status="requeuing")])
    assert [c.input for c in await claim] == ["again"]

    await queue.client.enqueue([EnqueueRolloutRequest(input="due", not_before=queue.clock.now + 5)])
    claim = asyncio.create_task(queue.client.claim(wait_seconds=30))
    await until_waiting(queue, 1)
    await queue.sweep(after=5)
    assert [c.input for c in await claim] == ["due"]


async def test_a_claim_that_finds_nothing_ends_after_its_time(queue: LocalQueue) -> None:
    assert await queue.client.claim(worker_id="w", wait_seconds=0.05) == []
    [worker] = await queue.client.query_workers()
    assert (worker.status, worker.last_dequeue_time, worker.last_idle_time) == ("idle", queue.clock.now, queue.clock.now)


async def test_many_claimers_never_get_the_same_rollout(queue: LocalQueue) -> None:
    taken: list[AttemptedRollout] = []

    async def claimer(client: QueueClient) -> None:
        while len(taken) < 200:  # and not until one of them finds nothing: the next enqueue may take its time
            taken.extend(await client.claim(3, wait_seconds=0.2))

    clients = [QueueClient(queue.client.address) for _ in range(8)]
    claimers = [asyncio.create_task(claimer(client)) for client in clients]
    for start in range(0, 200, 20):
        await queue.client.enqueue(tasks(*range(start, start + 20)))
    await asyncio.gather(*claimers)
    await asyncio.gather(*(client.close() for client in clients))
    assert sorted(c.input for c in taken) == [*range(200)]


async def test_a_claim_that_is_cancelled_while_it_waits_takes_nothing(queue: LocalQueue) -> None:
    disconnected = asyncio.create_task(queue.client.claim(wait_seconds=30))
    await until_waiting(queue, 1)
    disconnected.cancel()
    await until_waiting(queue, 0)
    await queue.client.enqueue(tasks("x"))
    assert [c.input for c in await queue.client.claim(wait_seconds=5)] == ["x"]


async def test_a_claimer_that_disconnects_at_any_moment_strands_no_rollout(queue: LocalQueue) -> None:
    for turns in range(40):
        [rollout] = await queue.client.enqueue(tasks(turns))
        client = QueueClient(queue.client.address)
        disconnected = asyncio.create_task(client.claim(wait_seconds=5))
        for _ in range(turns * 3):
            await asyncio.sleep(0)
        disconnected.cancel()
        result = (await asyncio.gather(disconnected, return_exceptions=True))[0]
        await client.close()
        claimed = result if isinstance(result, list) else await queue.client.claim(wait_seconds=5)
        assert [c.rollout_id for c in claimed] == [rollout.rollout_id]
        assert claimed[0].attempt.sequence_id == 1


async def test_a_released_claim_returns_to_its_place_as_if_never_taken(queue: LocalQueue) -> None:
    await queue.client.enqueue(tasks(1, 2, 3))
    claims = await queue.client.claim(2, worker_id="w")
    assert await queue.client.release(claims[:1]) == 1
    again = await queue.client.claim(2)
    assert [(c.input, c.attempt.sequence_id) for c in again] == [(1, 1), (3, 1)]
    assert again[0].attempt.attempt_id != claims[0].attempt.attempt_id


async def test_a_claim_that_was_begun_or_replaced_is_not_released(queue: LocalQueue) -> None:
    await queue.client.enqueue(tasks(1, 2))
    begun, replaced = await queue.client.claim(2)
    await queue.client.observe([Observation(begun.rollout_id, begun.attempt.attempt_id, 0, queue.clock.now)])
    await queue.client.start_attempt([replaced.rollout_id])
    assert await queue.client.release([begun, replaced]) == 0


async def test_a_claim_that_is_written_while_its_connection_is_cut_is_put_back(queue: LocalQueue) -> None:
    [rollout] = await queue.client.enqueue(tasks("x"))
    calls = Calls(queue.client.address, token="", timeout_seconds=300, retry_seconds=0)
    begun, over = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hold(tx: Transaction) -> None:
        tx.run_many("answer_remember", [{"request_id": "r", "method": "Claim", "answer": "[]", "now": 0.0}])
        tx.rows("answers_recall", {"request_ids": '["r"]'})
        loop.call_soon_threadsafe(begun.set)
        over.wait(300)
        raise UsageError("nothing has happened")

    first = queue.engine.write(hold)  # until this ends the claim can begin, but not commit
    await begun.wait()
    disconnected = asyncio.create_task(calls.call("Claim", pb.ClaimRequest(limit=1, wait_seconds=5, request_id="r"), pb.Rollouts))
    await until_waiting(queue, 1)
    disconnected.cancel()
    await until_waiting(queue, 0)
    over.set()
    with pytest.raises(UsageError, match="nothing has happened"):
        await first
    await queue.server.service.drain()
    await calls.close()
    [again] = await queue.client.query_rollouts()
    assert again == rollout
    assert [c.attempt.sequence_id for c in await queue.client.claim()] == [1]


async def test_a_claim_whose_answer_was_lost_is_released_by_its_request_id(queue: LocalQueue) -> None:
    await queue.client.enqueue(tasks(1, 2))
    calls = Calls(queue.client.address, token="", timeout_seconds=300, retry_seconds=0)
    claim = pb.ClaimRequest(limit=2, request_id=new_request_id())
    await calls.call("Claim", claim, pb.Rollouts)
    release = pb.ReleaseRequest(claim_request_id=claim.request_id, request_id=new_request_id())
    assert (await calls.call("Release", release, pb.ReleaseResponse)).released == 2
    await calls.close()
    assert [c.input for c in await queue.client.claim(2)] == [1, 2]


async def test_a_callers_id_is_kept_and_returns_the_same_rollout(queue: LocalQueue) -> None:
    request = EnqueueRolloutRequest(input=1, rollout_id="mine:1")
    [first] = await queue.client.enqueue([request])
    [again, other] = await queue.client.enqueue([request.model_copy(update={"input": 2}), *tasks(3)])
    assert (first.rollout_id, again) == ("mine:1", first)
    assert (await queue.client.query_rollouts()).items == [first, other]


async def test_a_callers_id_repeated_in_one_call_is_one_rollout(queue: LocalQueue) -> None:
    request = EnqueueRolloutRequest(input=1, rollout_id="mine")
    answer = await queue.client.enqueue([request, request])
    assert [r.rollout_id for r in answer] == ["mine", "mine"]
    assert len(await queue.client.query_rollouts()) == 1


async def test_an_invalid_rollout_id_is_refused(queue: LocalQueue) -> None:
    with pytest.raises(UsageError, match="rollout id 'a b' is not allowed"):
        await queue.client.enqueue([EnqueueRolloutRequest(input=1, rollout_id="a b")])
    assert issubclass(InvalidIdError, UsageError)
    assert len(await queue.client.query_rollouts()) == 0


async def test_an_idempotency_key_makes_its_rollouts_once(queue: LocalQueue) -> None:
    first = await queue.client.enqueue(tasks(1, 2), idempotency_key="epoch-1")
    again = await queue.client.enqueue(tasks(1, 2), idempotency_key="epoch-1")
    assert again == first
    for others in (tasks(1, 3), tasks(1), tasks(1, 2, 3), tasks(2, 1), []):
        with pytest.raises(ConflictError, match="idempotency key 'epoch-1' was used for other rollouts, or for more or fewer"):
            await queue.client.enqueue(others, idempotency_key="epoch-1")
    assert [rollout.input for rollout in await queue.client.query_rollouts()] == [1, 2]


async def test_an_idempotency_key_covers_all_messages_of_a_call(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_otel.queue.calls.KEYED_ROLLOUTS", 2)
    first = await queue.client.enqueue(tasks(1, 2, 3, 4), idempotency_key="k")
    with pytest.raises(ConflictError, match="'k' was used for other rollouts, or for more"):
        await queue.client.enqueue(tasks(1, 2, 3, 4, 5), idempotency_key="k")
    assert await queue.client.enqueue(tasks(1, 2, 3, 4), idempotency_key="k") == first
    assert len(await queue.client.query_rollouts()) == 4


async def test_an_idempotency_key_is_free_again_when_its_rollouts_are_deleted(queue: LocalQueue) -> None:
    [first] = await queue.client.enqueue(tasks(1), idempotency_key="k")
    await queue.client.delete([first.rollout_id])
    [second] = await queue.client.enqueue(tasks(2), idempotency_key="k")
    assert second.input == 2


async def test_a_rollout_is_pinned_to_the_resources_of_its_enqueue(queue: LocalQueue) -> None:
    first = await queue.client.put_resources({"llm": LLM(endpoint="http://a/v1", model="m")})
    [before] = await queue.client.enqueue(tasks(1))
    await queue.client.put_resources({"llm": LLM(endpoint="http://b/v1", model="m")}, resources_id=first.resources_id)
    [after, unknown] = await queue.client.enqueue([*tasks(2), EnqueueRolloutRequest(input=3, resources_id="elsewhere")])
    assert [(r.resources_id, r.resources_version) for r in (before, after, unknown)] == [
        (first.resources_id, 1),
        (first.resources_id, 2),
        ("elsewhere", None),
    ]


async def test_a_started_rollout_is_never_queued(queue: LocalQueue) -> None:
    [started] = await queue.client.start(tasks("x"), worker_id="w")
    assert (started.status, started.attempt.status, started.attempt.sequence_id) == ("preparing", "preparing", 1)
    assert started.token
    assert await queue.client.claim() == []
    [worker] = await queue.client.query_workers()
    assert (worker.status, worker.current_rollout_id) == ("busy", started.rollout_id)


async def test_a_requested_attempt_ignores_max_attempts(queue: LocalQueue) -> None:
    [started] = await queue.client.start(tasks("x"))
    [second] = await queue.client.start_attempt([started.rollout_id])
    assert second.attempt.sequence_id == 2
    with pytest.raises(NotFoundError, match="no rollout 'ro-none'"):
        await queue.client.start_attempt(["ro-none"])


async def test_a_worker_is_tied_to_the_last_rollout_of_its_claim(queue: LocalQueue) -> None:
    await queue.client.enqueue(tasks(1, 2))
    claims = await queue.client.claim(2, worker_id="w")
    [worker] = await queue.client.query_workers()
    assert (worker.status, worker.current_attempt_id) == ("busy", claims[1].attempt.attempt_id)
    assert (worker.last_dequeue_time, worker.last_busy_time, worker.last_idle_time) == (queue.clock.now, queue.clock.now, None)


async def test_a_worker_with_several_places_is_busy_until_its_last_attempt_ends(queue: LocalQueue) -> None:
    client = queue.client
    await client.enqueue(tasks(*range(8)))
    claims = await client.claim(8, worker_id="w")
    for left, claim in zip(range(7, -1, -1), claims, strict=True):
        update = AttemptUpdate(rollout_id=claim.rollout_id, attempt_id=claim.attempt.attempt_id, status="succeeded", token=claim.token)
        await client.update_attempts([update])
        assert await client.claim(1, worker_id="w") == []
        [worker] = await client.query_workers(status_in=["busy"] if left else ["idle"])
        current = (worker.current_rollout_id, worker.current_attempt_id)
        assert current in {(c.rollout_id, c.attempt.attempt_id) for c in claims[8 - left :]} if left else current == (None, None)
        assert (await client.query_workers(status_in=["idle"] if left else ["busy"])).total == 0


async def test_a_worker_whose_other_attempts_are_cancelled_or_deleted_is_not_busy(queue: LocalQueue) -> None:
    client = queue.client
    await client.enqueue(tasks(1, 2))
    cancelled, deleted = await client.claim(2, worker_id="w")
    await client.update_rollouts([RolloutUpdate(rollout_id=cancelled.rollout_id, status="cancelled")])
    await client.delete([deleted.rollout_id])
    assert await client.claim(1, worker_id="w") == []
    [worker] = await client.query_workers()
    assert (worker.status, worker.current_attempt_id) == ("idle", None)


async def test_more_rollouts_than_a_message_holds_are_enqueued_and_claimed_in_parts(queue: LocalQueue) -> None:
    large = "x" * (10 << 20)
    requests = tasks(*(f"{i}{large}" for i in range(5)))
    rollouts = await queue.client.enqueue(requests, idempotency_key="big")
    again = await queue.client.enqueue(requests, idempotency_key="big")
    assert [r.rollout_id for r in again] == [r.rollout_id for r in rollouts]
    claimed: list[str] = []
    while part := await queue.client.claim(100):
        claimed += [claim.rollout_id for claim in part]
    assert claimed == [r.rollout_id for r in rollouts]


async def test_a_rollout_that_is_too_large_is_refused_with_the_remedy(queue: LocalQueue) -> None:
    with pytest.raises(UsageError, match="rollout 1 has 33 MiB, and 32 MiB is the most for one: put the data somewhere else"):
        await queue.client.enqueue(tasks("small", "x" * (33 << 20)))
    assert (await queue.client.statistics())["total_rollouts"] == 0


async def test_a_wrong_rollout_is_refused_before_the_first_message(queue: LocalQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agl_otel.queue.calls.PART_ROLLOUTS", 2)
    for wrong in (
        EnqueueRolloutRequest(input=4, rollout_id="a b"),
        EnqueueRolloutRequest(input=4, mode="production"),
        EnqueueRolloutRequest(input=4, metadata={"not": object()}),
    ):
        with pytest.raises(UsageError):
            await queue.client.enqueue([*tasks(1, 2, 3), wrong])
    assert (await queue.client.statistics())["total_rollouts"] == 0


async def test_concurrent_claims_and_reports_get_their_own_answers(queue: LocalQueue) -> None:
    rollouts = await queue.client.enqueue(tasks(*range(50)))
    async with asyncio.TaskGroup() as group:
        claims = [group.create_task(queue.client.claim(1 + i % 3, worker_id=f"w{i}")) for i in range(24)]
    claimed = [found for claim in claims for found in claim.result()]
    assert sorted(found.rollout_id for found in claimed) == sorted(r.rollout_id for r in rollouts[: len(claimed)])
    assert len(claimed) == 48
    for i, claim in enumerate(claims):
        assert {found.attempt.worker_id for found in claim.result()} == {f"w{i}"}
    wrong = AttemptUpdate(rollout_id=rollouts[49].rollout_id, attempt_id="at-none", status="succeeded")
    updates = [AttemptUpdate(rollout_id=r.rollout_id, attempt_id="latest", status="succeeded") for r in claimed]
    outcomes = await asyncio.gather(*(queue.client.update_attempts([u]) for u in [*updates, wrong]), return_exceptions=True)
    assert [[a.attempt_id for a in done] for done in outcomes[:-1]] == [[r.attempt.attempt_id] for r in claimed]  # pyright: ignore[reportGeneralTypeIssues]
    assert isinstance(outcomes[-1], NotFoundError)
    workers = await queue.client.query_workers()
    assert {worker.status for worker in workers} == {"idle"} and len(workers) == 24
    statistics = await queue.client.statistics()
    assert (statistics["rollouts_by_status"], statistics["total_attempts"]) == ({"succeeded": 48, "queuing": 2}, 48)
