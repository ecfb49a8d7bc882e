"""Groups: rollouts of one task that are enqueued together and compared with each other. Late groups are carried into the next step.

Waiting for the slowest rollout leaves runners idle. With more groups in flight than a step needs, a step takes the first complete ones
and leaves the others running. Their age is bounded, because samples of older weights are less useful.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from agl_otel.adapters.selection import task_key
from agl_otel.algorithms.utils import is_retryable
from agl_otel.errors import NotFoundError
from agl_otel.types import AttemptedRollout, EnqueueRolloutRequest, Rollout

REWARD_SECONDS: Final = 2.0
"""Interval at which is asked for rewards that are waited for."""


class GroupStore(Protocol):
    """The part of `agl_otel.store.Store` that groups use."""

    async def enqueue(self, tasks: Sequence[Any]) -> list[Rollout]:
        """Enqueue rollouts, in order."""
        ...

    def watch(
        self, rollout_ids: Sequence[str], *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Rollout | AttemptedRollout, None]:
        """Yield each rollout as it finishes, until all have or the time is up."""
        ...

    async def set_status(self, rollout_ids: Sequence[str], status: Any) -> list[Rollout]:
        """Change the status of rollouts. Raises NotFoundError."""
        ...


@dataclass(eq=False)
class Group:
    """The rollouts of one task in one step."""

    number: int
    """0, 1, … in the order of enqueueing, over the whole run."""
    step: int
    """The step that enqueued it."""
    rollout_ids: Sequence[str]
    finished: dict[str, Rollout | AttemptedRollout] = field(default_factory=dict[str, Rollout | AttemptedRollout])
    unrewarded: dict[str, Rollout | AttemptedRollout] = field(default_factory=dict[str, Rollout | AttemptedRollout])
    """Those that have ended, and still wait for a reward (RewardWait)."""

    @property
    def whole(self) -> bool:
        """Whether all rollouts have finished, successfully or not."""
        return len(self.finished) == len(self.rollout_ids)

    @property
    def running(self) -> list[str]:
        """The rollouts that have not ended; those that wait for a reward have."""
        return [name for name in self.rollout_ids if name not in self.finished and name not in self.unrewarded]

    def finish(self, rollout_ids: Iterable[str]) -> None:
        """Let rollouts wait for no reward any more."""
        for rollout_id in rollout_ids:
            self.finished[rollout_id] = self.unrewarded.pop(rollout_id)


@dataclass(frozen=True)
class RewardWait:
    """How long after its end a rollout that succeeded waits for a reward before it counts as finished."""

    seconds: float
    rewarded: Callable[[Sequence[str]], Awaitable[Set[str]]]
    """Returns those of the rollouts that have a reward."""

    async def over(self, rollouts: Sequence[Rollout | AttemptedRollout]) -> set[str]:
        """Return the ids of those that need not wait any more."""
        oldest = time.time() - self.seconds
        over = {each.rollout_id for each in rollouts if each.status != "succeeded" or (each.end_time or 0) <= oldest}
        left = [each.rollout_id for each in rollouts if each.rollout_id not in over]
        return over | (await self.rewarded(left) if left else set())

    async def ready(self, rollouts: Sequence[Rollout | AttemptedRollout]) -> list[Rollout | AttemptedRollout]:
        """Return those whose tasks have no rollout that waits: the rewards of a task are compared with each other."""
        over = await self.over(rollouts)
        waiting = {task_key(each) for each in rollouts if each.rollout_id not in over}
        return [each for each in rollouts if task_key(each) not in waiting]

    async def until_over(self, rollouts: Sequence[Rollout | AttemptedRollout], timeout_seconds: float) -> None:
        """Return when none of them need wait any more, or the time is over."""
        deadline = time.monotonic() + timeout_seconds
        while (left := deadline - time.monotonic()) > 0:
            if len(await self.over(rollouts)) == len(rollouts):
                return
            await asyncio.sleep(min(left, REWARD_SECONDS))


Take = Mapping[str, Sequence[str]]
"""The groups that a call of `InFlight.take` returned, as JSON: {number of the group: its rollouts that had finished}."""


def as_take(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Return what was taken, for `InFlight.repeat`."""
    return {str(group.number): [rollout_id for rollout_id in group.rollout_ids if rollout_id in group.finished] for group in groups}


def group_rollouts(rollouts: Sequence[Rollout | AttemptedRollout], *, first: int, step: int) -> list[Group]:
    """Group ended rollouts by equal tasks; groups are numbered from `first`.

    Tasks with a single rollout form one group, the last: their rewards can only be compared with each other.
    """
    by_task: dict[str, list[Rollout | AttemptedRollout]] = {}
    for rollout in rollouts:
        by_task.setdefault(task_key(rollout), []).append(rollout)
    groups = [members for members in by_task.values() if len(members) > 1]
    if singles := [members[0] for members in by_task.values() if len(members) == 1]:
        groups.append(singles)
    return [
        Group(number, step, [rollout.rollout_id for rollout in members], {rollout.rollout_id: rollout for rollout in members})
        for number, members in enumerate(groups, start=first)
    ]


class InFlight:
    """The groups that are enqueued and not taken yet."""

    def __init__(self, store: GroupStore, reward_wait: RewardWait | None = None) -> None:
        self._store = store
        self._reward_wait = reward_wait
        self.count = 0
        """Number of groups that the run has enqueued."""
        self.groups: list[Group] = []
        self._takes: dict[int, list[Take]] = {}
        self._numbers: set[int] = set()

    def repeat(self, takes: Mapping[int, Sequence[Take]]) -> None:
        """Have `take` return, in these steps, what it returned before the run was stopped: {step: its takes, in order}.

        What had failed by then, or was late, stays so: only rollouts of other groups are run again.
        """
        self._takes = {step: [*each] for step, each in takes.items()}
        self._numbers = {int(number) for each in self._takes.values() for take in each for number in take}

    async def restore(self, count: int, groups: Sequence[Mapping[str, Any]]) -> None:
        """Restore the groups of a run that was stopped."""
        self.count = count
        self.groups = [Group(group["number"], group["step"], group["rollout_ids"]) for group in groups]
        ids = [rollout_id for group in self.groups if group.number not in self._numbers for rollout_id in group.rollout_ids]
        if ids:
            async with aclosing(self._store.watch(ids, timeout_seconds=0)) as finished:
                await requeue_failed(self._store, [rollout async for rollout in finished])

    async def enqueue(self, groups: Sequence[Sequence[EnqueueRolloutRequest]], *, step: int) -> None:
        """Enqueue the rollouts of these groups in one call; in a resumed run they may exist already."""
        if not groups:
            return
        rollouts = iter(await self._store.enqueue([request for group in groups for request in group]))
        again: list[Rollout] = []
        for group in groups:
            members = [next(rollouts) for _ in group]
            again += members if self.count not in self._numbers else []
            self.groups.append(Group(self.count, step, [rollout.rollout_id for rollout in members]))
            self.count += 1
        await requeue_failed(self._store, again)

    async def take(self, count: int, *, step: int, oldest_step: int, timeout_seconds: float) -> list[Group]:
        """Take the first `count` complete groups, and all that were enqueued in `oldest_step` or before; ordered by number.

        The latter wait for their rollouts, and for no rewards. After `timeout_seconds` incomplete groups fill up the rest, with their
        finished rollouts; the others of these groups are cancelled, since no step will read them. Where the run did this `step` before it
        was stopped, the same groups are taken, with the same rollouts.
        """
        if self._takes.get(step):
            return await self._take_again(self._takes[step].pop(0), timeout_seconds)
        group_of = {rollout_id: group for group in self.groups for rollout_id in group.rollout_ids if rollout_id not in group.finished}
        await self._wait(group_of, timeout_seconds, until=lambda: self._ready(count, oldest_step))
        overdue = [group for group in self.groups if group.step <= oldest_step]
        others = sorted((group for group in self.groups if group.step > oldest_step), key=lambda group: (not group.whole, group.number))
        taken = sorted(overdue + others[: max(0, count - len(overdue))], key=lambda group: group.number)
        for group in taken:
            group.finish(list(group.unrewarded))
        self.groups = [group for group in self.groups if group not in taken]
        await cancel_all(self._store, _running(taken))
        return taken

    async def _take_again(self, before: Take, timeout_seconds: float) -> list[Group]:
        taken = [group for group in self.groups if str(group.number) in before]
        self.groups = [group for group in self.groups if group not in taken]
        group_of = {rollout_id: group for group in taken for rollout_id in before[str(group.number)]}
        await self._watch(group_of, timeout_seconds, until=lambda: False)
        for group in taken:
            group.finish(list(group.unrewarded))
        return taken

    async def _wait(self, group_of: Mapping[str, Group], timeout_seconds: float, *, until: Callable[[], bool]) -> None:
        """Put these rollouts, each into its group, as they finish: until `until` holds, the time is over, or no other can finish."""
        if self._reward_wait is None:
            await self._watch(group_of, timeout_seconds, until=until)
            return
        deadline = time.monotonic() + timeout_seconds
        running = {name: group for group in dict.fromkeys(group_of.values()) for name in group.running}
        watching = asyncio.create_task(self._watch(running, timeout_seconds, until=until))
        try:
            while not until() and (left := deadline - time.monotonic()) > 0:
                if not watching.done():
                    await asyncio.wait({watching}, timeout=min(left, REWARD_SECONDS))
                elif error := watching.exception():
                    raise error
                elif any(group.unrewarded for group in group_of.values()):
                    await asyncio.sleep(min(left, REWARD_SECONDS))
                else:
                    return  # what has not finished was deleted
                await self._finish_rewarded(self._reward_wait)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _finish_rewarded(self, wait: RewardWait) -> None:
        over = await wait.over([rollout for group in self.groups for rollout in group.unrewarded.values()])
        for group in self.groups:
            group.finish(over & group.unrewarded.keys())

    async def _watch(self, group_of: Mapping[str, Group], timeout_seconds: float, *, until: Callable[[], bool]) -> None:
        if group_of and not until():
            async with aclosing(self._store.watch(list(group_of), timeout_seconds=timeout_seconds)) as ended:
                async for rollout in ended:
                    group = group_of[rollout.rollout_id]
                    (group.finished if self._reward_wait is None else group.unrewarded)[rollout.rollout_id] = rollout
                    if until():
                        break

    async def cancel(self) -> int:
        """Drop all groups and cancel their unfinished rollouts; return the number of these."""
        unfinished, self.groups = _running(self.groups), []
        await cancel_all(self._store, unfinished)
        return len(unfinished)

    def _ready(self, count: int, oldest_step: int) -> bool:
        overdue = [group for group in self.groups if group.step <= oldest_step]
        ready = sum(group.whole for group in self.groups if group.step > oldest_step) + len(overdue)  # which wait for no reward
        return not any(group.running for group in overdue) and ready >= min(count, len(self.groups))


def _running(groups: Sequence[Group]) -> list[str]:
    return [name for group in groups for name in group.running]


async def cancel_all(store: GroupStore, rollout_ids: Sequence[str]) -> None:
    """Cancel these rollouts, except deleted ones."""
    await asyncio.gather(*(cancel_if_exists(store, rollout_id) for rollout_id in rollout_ids))


async def cancel_if_exists(store: GroupStore, rollout_id: str) -> None:
    """Cancel a rollout, unless it was deleted."""
    with suppress(NotFoundError):
        await store.set_status([rollout_id], "cancelled")


async def requeue_failed(store: GroupStore, rollouts: Sequence[Rollout]) -> None:
    """Requeue retryable rollouts, which may have failed or been cancelled because the run was stopped."""
    again = [rollout.rollout_id for rollout in rollouts if is_retryable(rollout)]
    if again:
        await store.set_status(again, "requeuing")


class TaskOrder:
    """Yields task numbers without end: every task once, shuffled, before any is repeated. The state can be saved and restored."""

    def __init__(self, tasks: int, source: random.Random) -> None:
        self._tasks = tasks
        self._source = source
        self._left: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self._left:
            self._left = self._source.sample(range(self._tasks), self._tasks)[::-1]
        return self._left.pop()

    @property
    def state(self) -> dict[str, Any]:
        """The state for `restore`, as JSON."""
        return {"left": list(self._left), "source": list(self._source.getstate())}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self._left = list(state["left"])
        version, internal, gauss = state["source"]
        self._source.setstate((version, tuple(internal), gauss))
