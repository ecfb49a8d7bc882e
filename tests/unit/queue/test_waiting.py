"""Who is woken by what."""

from __future__ import annotations

from agl_otel.queue.engine import Signals
from agl_otel.queue.waiting import ClaimWaiter, Waiting


def parked(waiting: Waiting, *limits: int, filtered: bool = False) -> list[ClaimWaiter]:
    waiters = [ClaimWaiter(limit, filtered=filtered) for limit in limits]
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
