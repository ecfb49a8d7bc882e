"""Which waiters a signal wakes."""

from __future__ import annotations

from typing import Any

from agl_otel.queue.engine import Signals
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.queue.waiters import ClaimWaiter, Waiters


def waiting_claims(waiters: Waiters, *limits: int, filtered: bool = False) -> list[ClaimWaiter]:
    claims = [ClaimWaiter(pb.ClaimRequest(limit=limit, modes=["train"] if filtered else [])) for limit in limits]
    for claim in claims:
        waiters.add(claim)
    return claims


def woken(claims: list[ClaimWaiter]) -> list[bool]:
    return [waiter.event.is_set() for waiter in claims]


def test_one_rollout_wakes_only_the_longest_waiting_claim() -> None:
    waiters = Waiters()
    claims = waiting_claims(waiters, 1, 1, 1)
    waiters.on_signals(Signals(claimable=1))
    assert woken(claims) == [True, False, False]


def test_only_as_many_claims_are_woken_as_there_are_rollouts() -> None:
    waiters = Waiters()
    claims = waiting_claims(waiters, 2, 2, 2)
    waiters.on_signals(Signals(claimable=3))
    assert woken(claims) == [True, True, False]


def test_a_claim_that_is_awake_already_does_not_use_up_a_second_rollout() -> None:
    waiters = Waiters()
    claims = waiting_claims(waiters, 1, 1)
    waiters.on_signals(Signals(claimable=1))
    waiters.on_signals(Signals(claimable=1))
    assert woken(claims) == [True, True]


def test_claims_of_each_filter_are_woken_for_as_many_rollouts_as_there_are() -> None:
    waiters = Waiters()
    filtered = waiting_claims(waiters, 1, 1, 1, filtered=True)
    plain = waiting_claims(waiters, 1, 1, 1)
    waiters.on_signals(Signals(claimable=2))
    assert woken(filtered) == woken(plain) == [True, True, False]


def test_an_unused_wake_up_passes_to_the_next_claim() -> None:
    waiters = Waiters()
    removed, stays = waiting_claims(waiters, 1, 1)
    waiters.on_signals(Signals(claimable=1))
    waiters.remove(removed)
    assert stays.event.is_set()
    assert waiters.claims_waiting == 1


def test_removing_a_sleeping_claim_wakes_no_other() -> None:
    waiters = Waiters()
    removed, stays = waiting_claims(waiters, 1, 1)
    waiters.remove(removed)
    assert not stays.event.is_set()


def new(count: int, **fields: Any) -> list[pb.NewRollout]:
    return [pb.NewRollout(**fields) for _ in range(count)]


async def test_a_hand_off_takes_as_many_idle_claims_as_there_is_work_for() -> None:
    waiters = Waiters()
    [trying], [filtered], [first, second, third] = (
        waiting_claims(waiters, 1),
        waiting_claims(waiters, 1, filtered=True),
        waiting_claims(waiters, 2, 2, 2),
    )
    for waiter in (filtered, first, second, third):
        waiter.idle = True
    assert waiters.begin_hand_off(new(3, mode="val"), at_most=16) == [first, second]
    assert waiters.begin_hand_off(new(1), at_most=16) == [third]  # the others expect theirs already
    assert trying.handed is filtered.handed is None


async def test_a_hand_off_serves_claims_of_one_filter_which_admits_the_rollouts() -> None:
    waiters = Waiters()
    [plain], train = waiting_claims(waiters, 1), waiting_claims(waiters, 1, 1, 1, filtered=True)
    for waiter in (*train, plain):
        waiter.idle = True
    waiters.remove(plain)
    waiters.add(plain)  # the last in the row
    assert waiters.begin_hand_off(new(2, mode="train"), at_most=16) == train[:2]
    assert waiters.begin_hand_off(new(2, mode="train"), at_most=16) == train[2:]
    assert waiters.begin_hand_off(new(2, mode="train"), at_most=16) == [plain]


async def test_a_claim_that_expects_a_hand_off_is_not_woken_too() -> None:
    waiters = Waiters()
    served, other = waiting_claims(waiters, 1, 1)
    served.idle = True
    assert waiters.begin_hand_off(new(5), at_most=1) == [served]
    waiters.on_signals(Signals(claimable=1))
    assert woken([served, other]) == [False, True]


def test_settled_rollouts_reach_their_listeners_until_these_stop() -> None:
    waiters = Waiters()
    ids = ["ro-1", "ro-2"]
    queue = waiters.listen(ids)
    waiters.on_signals(Signals(settled=["ro-2", "ro-3"]))
    assert queue.get_nowait() == "ro-2"
    assert queue.empty()
    waiters.forget(ids, queue)
    waiters.on_signals(Signals(settled=["ro-1"]))
    assert queue.empty()


async def test_every_wait_is_woken_when_signals_may_have_been_lost() -> None:
    waiters = Waiters()
    settled = waiters.listen(["a", "b"])
    waiters.on_signals(Signals(missed=True))
    assert sorted(settled.get_nowait() for _ in range(settled.qsize())) == ["a", "b"]
