"""The waiters of a service: long-polling claims, and `wait` streams. Runs on the event loop, without polling.

A claim that found nothing waits here. A commit that makes rollouts claimable wakes as many of the longest-waiting claims of each filter as
there may be rollouts for; an unused wake-up passes to the next claim. An enqueue may claim for idle waiters in its own transaction
(`begin_hand_off`, `ClaimWaiter.handed`): one sync, not two.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

from agl_otel.queue.engine import Signals
from agl_otel.queue.operations.claim import admits, kind
from agl_otel.queue.proto import queue_pb2 as pb

ALL: Final = 1 << 62


class ClaimWaiter:
    """One waiting claim."""

    def __init__(self, request: pb.ClaimRequest) -> None:
        self.request = request
        self.limit = max(request.limit, 1)
        self.kind = kind(request)
        self.event = asyncio.Event()
        self.idle = False
        """Whether it waits for `event`, rather than for its own query."""
        self.handed: asyncio.Future[pb.Rollouts] | None = None
        """The rollouts that an enqueue's transaction claims for it (may be empty). `event` is set when the future is done."""


class Waiters:
    """The waiters of one service; subscribe `on_signals` to the engine."""

    def __init__(self) -> None:
        self._claims: dict[ClaimWaiter, None] = {}  # an ordered set: the longest-waiting first
        self._settled: defaultdict[str, set[asyncio.Queue[str]]] = defaultdict(set)

    def on_signals(self, signals: Signals) -> None:
        """Wake the waiters that a committed transaction affects."""
        self.wake_claims(signals.claimable)
        for rollout_id in self._settled if signals.missed else signals.settled:
            for queue in self._settled.get(rollout_id, ()):
                queue.put_nowait(rollout_id)

    # --- claims

    @property
    def claims_waiting(self) -> int:
        """How many claims are waiting."""
        return len(self._claims)

    @property
    def claims_idle(self) -> int:
        """How many claims are idle and without a hand-off."""
        return sum(waiter.idle and waiter.handed is None for waiter in self._claims)

    def add(self, waiter: ClaimWaiter) -> None:
        """Add a claim; call it before the claim's first query, so that no commit is missed in between."""
        self._claims[waiter] = None

    def remove(self, waiter: ClaimWaiter) -> None:
        """Remove a claim; an unused wake-up passes to the next one."""
        self._claims.pop(waiter, None)
        if waiter.event.is_set():
            self.wake_claims(waiter.limit)

    def wake_claims(self, claimable: int) -> None:
        """Wake the longest-waiting claims of each filter for `claimable` rollouts: all of them may be what it asks for."""
        left: dict[Hashable, int] = {}
        for waiter in self._claims:
            if left.setdefault(waiter.kind, claimable) > 0 and waiter.handed is None and not waiter.event.is_set():
                waiter.event.set()
                left[waiter.kind] -= waiter.limit

    def begin_hand_off(self, rollouts: Sequence[pb.NewRollout], at_most: int) -> list[ClaimWaiter]:
        """Select the longest-waiting idle claims, at most `at_most`, for these rollouts; give each a `handed` future.

        All have the filter of the one that has waited longest for one of the first of these rollouts.
        """
        taken: list[ClaimWaiter] = []
        work, admitted = len(rollouts), dict[Hashable, bool]()
        for waiter in self._claims:
            if work <= 0 or len(taken) >= at_most:
                break
            if not waiter.idle or waiter.handed is not None or waiter.event.is_set() or (taken and waiter.kind != taken[0].kind):
                continue
            if waiter.kind not in admitted:
                admitted[waiter.kind] = any(admits(waiter.request, rollout) for rollout in rollouts[:at_most])
            if admitted[waiter.kind]:
                waiter.handed = asyncio.get_running_loop().create_future()
                taken.append(waiter)
                work -= waiter.limit
        return taken

    # --- finished rollouts

    @property
    def awaited(self) -> int:
        """How many rollouts are waited for."""
        return len(self._settled)

    def listen(self, rollout_ids: Iterable[str]) -> asyncio.Queue[str]:
        """Return a queue that receives the id of each of these rollouts when it is finished or deleted."""
        queue: asyncio.Queue[str] = asyncio.Queue()
        for rollout_id in rollout_ids:
            self._settled[rollout_id].add(queue)
        return queue

    def forget(self, rollout_ids: Iterable[str], queue: asyncio.Queue[str]) -> None:
        """End `listen`."""
        for rollout_id in rollout_ids:
            queues = self._settled.get(rollout_id)
            if queues is not None:
                queues.discard(queue)
                if not queues:
                    del self._settled[rollout_id]
