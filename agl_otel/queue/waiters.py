"""The waiters of a service: long-polling claims, and `wait` streams. Runs on the event loop, without polling.

A claim that found nothing waits here and is woken by the commit that makes a rollout claimable: as many of the longest-waiting as there is
work for, and every one with a filter, because only its own query knows whether it matches. A wake-up that a claim could not use goes to
the next. An enqueue may hand rollouts to idle claims in its own transaction (`begin_hand_off`, `ClaimWaiter.handed`): one sync, not two.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from agl_otel.queue.engine import Signals
from agl_otel.queue.proto import queue_pb2 as pb

ALL: Final = 1 << 62


class ClaimWaiter:
    """One claim that waits."""

    def __init__(self, request: pb.ClaimRequest) -> None:
        self.request = request
        self.limit = max(request.limit, 1)
        self.filtered = bool(request.modes or request.labels)
        self.event = asyncio.Event()
        self.idle = False
        """Whether it waits for `event`, and not for a claim of its own."""
        self.handed: asyncio.Future[pb.Rollouts] | None = None
        """What an enqueue's transaction claims for it; empty where that came to nothing. `event` is set when it is there."""


class Waiters:
    """The waiters of one service; subscribe `on_signals` to the engine."""

    def __init__(self) -> None:
        self._claims: dict[ClaimWaiter, None] = {}  # an ordered set: the longest-waiting first
        self._settled: defaultdict[str, set[asyncio.Queue[str]]] = defaultdict(set)

    def on_signals(self, signals: Signals) -> None:
        """Wake the waiters that a committed transaction concerns."""
        self.wake_claims(signals.claimable)
        for rollout_id in self._settled if signals.missed else signals.settled:
            for queue in self._settled.get(rollout_id, ()):
                queue.put_nowait(rollout_id)

    # --- claims

    @property
    def claims_waiting(self) -> int:
        """How many claims wait."""
        return len(self._claims)

    @property
    def claims_idle(self) -> int:
        """How many of them do nothing but wait."""
        return sum(waiter.idle and waiter.handed is None for waiter in self._claims)

    def add(self, waiter: ClaimWaiter) -> None:
        """Add a claim; before its first try, so that no commit falls between."""
        self._claims[waiter] = None

    def remove(self, waiter: ClaimWaiter) -> None:
        """Remove a claim; a wake-up that it has not used goes to the next."""
        self._claims.pop(waiter, None)
        if waiter.event.is_set():
            self.wake_claims(waiter.limit)

    def wake_claims(self, claimable: int) -> None:
        """Wake the longest-waiting claims for so many rollouts, and all that have a filter."""
        if claimable <= 0:
            return
        for waiter in self._claims:
            if waiter.filtered:
                waiter.event.set()
            elif claimable > 0 and waiter.handed is None and not waiter.event.is_set():
                waiter.event.set()
                claimable -= waiter.limit

    def begin_hand_off(self, work: int, at_most: int) -> list[ClaimWaiter]:
        """The longest-waiting idle claims without a filter that take so many rollouts; each now expects its `handed`."""
        taken: list[ClaimWaiter] = []
        for waiter in self._claims:
            if work <= 0 or len(taken) >= at_most:
                break
            if waiter.idle and not waiter.filtered and waiter.handed is None and not waiter.event.is_set():
                waiter.handed = asyncio.get_running_loop().create_future()
                taken.append(waiter)
                work -= waiter.limit
        return taken

    # --- finished rollouts

    def listen(self, rollout_ids: Iterable[str]) -> asyncio.Queue[str]:
        """A queue that gets the id of each of these rollouts when it is finished or deleted."""
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
