"""Who is woken by what."""

from __future__ import annotations

from agl_otel.queue.engine import Signals
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.waiting import ClaimWaiter, Waiting


def parked(waiting: Waiting, *limits: int, filtered: bool = False) -> list[ClaimWaiter]:
    waiters = [ClaimWaiter(pb.ClaimRequest(limit=limit, modes=["train"] if filtered else [])) for limit in limits]
    for waiter in waiters:
        waiting.park(waiter)
    return waiters


def woken(waiters: list[ClaimWaiter]) -> list[bool]:
    return [waiter.event.is_set() for waiter in waiters]


def test_one_rollout_wakes_only_the_longest_waiting_claim() -> None:
    waiting = Waiting()
    waiters = parked(waiting, 1, 1, 1)
    waiting.on_signals(Signals(claimable=1))
    assert woken(waiters) == [True, False, False]


def test_as_many_claims_are_woken_as_there_is_work_for() -> None:
    waiting = Waiting()
    waiters = parked(waiting, 2, 2, 2)
    waiting.on_signals(Signals(claimable=3))
    assert woken(waiters) == [True, True, False]


def test_a_claim_that_is_awake_already_does_not_use_up_a_second_rollout() -> None:
    waiting = Waiting()
    waiters = parked(waiting, 1, 1)
    waiting.on_signals(Signals(claimable=1))
    waiting.on_signals(Signals(claimable=1))
    assert woken(waiters) == [True, True]


def test_claims_with_a_filter_are_always_woken_and_use_up_nothing() -> None:
    waiting = Waiting()
    filtered = parked(waiting, 1, 1, filtered=True)
    plain = parked(waiting, 1)
    waiting.on_signals(Signals(claimable=1))
    assert woken(filtered) == [True, True]
    assert woken(plain) == [True]


def test_a_wake_up_that_was_not_used_is_handed_on() -> None:
    waiting = Waiting()
    gone, stays = parked(waiting, 1, 1)
    waiting.on_signals(Signals(claimable=1))
    waiting.leave(gone)
    assert stays.event.is_set()
    assert waiting.claims_parked == 1


def test_a_claim_that_leaves_asleep_wakes_nobody() -> None:
    waiting = Waiting()
    gone, stays = parked(waiting, 1, 1)
    waiting.leave(gone)
    assert not stays.event.is_set()


async def test_an_enqueue_takes_idle_claims_along_as_many_as_it_has_work_for() -> None:
    waiting = Waiting()
    [trying], [filtered], [first, second, third] = parked(waiting, 1), parked(waiting, 1, filtered=True), parked(waiting, 2, 2, 2)
    for waiter in (filtered, first, second, third):
        waiter.idle = True
    assert waiting.idle_claims(3, at_most=16) == [first, second]
    assert waiting.idle_claims(1, at_most=16) == [third]  # the others are spoken for
    assert trying.handed is filtered.handed is None


async def test_who_is_served_by_another_call_is_not_woken_beside() -> None:
    waiting = Waiting()
    served, other = parked(waiting, 1, 1)
    served.idle = True
    assert waiting.idle_claims(5, at_most=1) == [served]
    waiting.on_signals(Signals(claimable=1))
    assert woken([served, other]) == [False, True]


def test_settled_rollouts_reach_those_who_listen_for_them_until_they_stop() -> None:
    waiting = Waiting()
    ids = ["ro-1", "ro-2"]
    queue = waiting.listen(ids)
    waiting.on_signals(Signals(settled=["ro-2", "ro-3"]))
    assert queue.get_nowait() == "ro-2"
    assert queue.empty()
    waiting.forget(ids, queue)
    waiting.on_signals(Signals(settled=["ro-1"]))
    assert queue.empty()


async def test_whoever_waits_for_rollouts_looks_himself_when_something_was_missed() -> None:
    waiting = Waiting()
    heard = waiting.listen(["a", "b"])
    waiting.on_signals(Signals(missed=True))
    assert sorted(heard.get_nowait() for _ in range(heard.qsize())) == ["a", "b"]
