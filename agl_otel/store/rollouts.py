"""The store's part for rollouts and attempts: what is intended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final, Literal

from agl_otel.queue.client import KEEP, AttemptUpdate, RolloutUpdate
from agl_otel.store.connections import UNSET, Connected, Unset
from agl_otel.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutQuery,
    RolloutStatus,
    TaskInput,
)
from agl_otel.types.queries import FilterLogic, SortOrder

OUTPUTS_SEARCHED: Final = 500
"""Rollouts whose outputs are read to find a text in them."""


class Rollouts(Connected):
    """Rollouts and attempts. Names, arguments and results are those of Agent Lightning 0.3."""

    # --- new ones

    async def start_rollout(
        self,
        input: TaskInput,  # noqa: A002 - the name that 0.3's callers use
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        """A rollout that is never queued, with a first attempt of `worker_id`; resources: the latest where no id is given."""
        request = _request(input, mode, resources_id, config, metadata)
        return (await (await self._open()).queue.start([request], worker_id=worker_id))[0]

    async def enqueue_rollout(
        self,
        input: TaskInput,  # noqa: A002 - the name that 0.3's callers use
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        """Put one rollout at the end of the queue; resources: the latest where no id is given."""
        return (await self.enqueue([_request(input, mode, resources_id, config, metadata)]))[0]

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Put rollouts at the end of the queue, in order."""
        return await self.enqueue(rollouts)

    async def enqueue(self, tasks: Sequence[Any], *, idempotency_key: str | None = None, **common: Any) -> list[Rollout]:
        """Queue one rollout for each task, in order.

        Args:
            tasks: EnqueueRolloutRequests, or plain inputs (anything JSON) that become requests with `common` fields.
            idempotency_key: the same key gives the same rollouts again instead of new ones.
            common: fields of EnqueueRolloutRequest for plain inputs (`mode`, `resources_id`, `config`, `metadata`, …).
        """
        requests = [t if isinstance(t, EnqueueRolloutRequest) else EnqueueRolloutRequest(input=t, **common) for t in tasks]
        return await (await self._open()).queue.enqueue(requests, idempotency_key=idempotency_key)

    enqueue_many = enqueue

    # --- to be run

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """Claim the next rollout; None at once where there is none."""
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(self, *, limit: int = 1, worker_id: str | None = None) -> list[AttemptedRollout]:
        """Claim up to `limit` rollouts, the oldest first, without waiting; each has a new attempt."""
        return await (await self._open()).queue.claim(limit, worker_id=worker_id) if limit > 0 else []

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """A further attempt, whatever max_attempts says. Raises NotFoundError (a ValueError)."""
        return (await (await self._open()).queue.start_attempt([rollout_id], worker_id=worker_id))[0]

    # --- what there is

    async def query_rollouts(
        self,
        rollout_ids: Sequence[str] | None = None,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        mode_in: Sequence[RolloutMode] | None = None,
        run: str | None = None,
        input_contains: str | None = None,
        attempts_from: int = 0,
        output_contains: str | None = None,
    ) -> PaginatedResult[Rollout | AttemptedRollout]:
        """`rollouts` by keywords; `status` and `rollout_ids` are older names of `status_in` and `rollout_id_in`."""
        return await self.rollouts(
            RolloutQuery(
                status_in=status_in if status_in is not None else status,
                rollout_id_in=rollout_id_in if rollout_id_in is not None else rollout_ids,
                rollout_id_contains=rollout_id_contains,
                mode_in=mode_in,
                run=run,
                input_contains=input_contains,
                output_contains=output_contains,
                attempts_from=attempts_from,
                filter_logic=filter_logic,
                sort_by=sort_by,
                sort_order=sort_order,
                limit=limit,
                offset=offset,
            )
        )

    async def rollouts(self, query: RolloutQuery) -> PaginatedResult[Rollout | AttemptedRollout]:
        """Rollouts that match, with their latest attempts."""
        connection = await self._open()
        if not query.output_contains:
            return await connection.queue.query_rollouts(query)
        looked = await connection.queue.query_rollouts(query, output_contains=None, limit=OUTPUTS_SEARCHED, offset=0)
        attempts = [each.attempt for each in looked if isinstance(each, AttemptedRollout)]
        matching = await connection.reader.saying(attempts, query.output_contains)
        found = [each for each in looked if each.rollout_id in matching]
        page = found[max(query.offset, 0) :][: query.limit if query.limit >= 0 else None]
        searched = len(looked) if looked.total > len(looked) else None
        return PaginatedResult(page, query.limit, query.offset, len(found), searched=searched)

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | AttemptedRollout | None:
        """The rollout, with its latest attempt; None where there is none."""
        return next(iter(await self.rollouts(RolloutQuery(rollout_id_in=[rollout_id]))), None)

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """The attempts of a rollout; none for an unknown one."""
        queue = (await self._open()).queue
        return await queue.query_attempts([rollout_id], sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """The attempt with the highest number; None where there is none."""
        return next(iter(await (await self._open()).queue.query_attempts([rollout_id], latest_only=True)), None)

    # --- as they finish

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout | AttemptedRollout]:
        """Those that have finished, in the order asked for, once all have or `timeout` seconds (0: one look) are over."""
        return await self.wait(rollout_ids, timeout_seconds=timeout)

    async def wait(self, rollout_ids: Sequence[str], *, timeout_seconds: float | None = None) -> list[Rollout | AttemptedRollout]:
        """Wait until all of them have finished, or the time is up; the finished ones, in the order asked for. Unknown ids are left out."""
        done = {rollout.rollout_id: rollout async for rollout in self.watch(rollout_ids, timeout_seconds=timeout_seconds)}
        return [done[rollout_id] for rollout_id in rollout_ids if rollout_id in done]

    async def watch(
        self, rollout_ids: Sequence[str], *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Rollout | AttemptedRollout, None]:
        """Each of them as it finishes; ends when all have, or the time is up. Unknown ids are left out."""
        async for finished in (await self._open()).queue.wait(rollout_ids, timeout_seconds=timeout_seconds):
            for rollout in finished:
                yield rollout

    # --- changes

    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput | Unset = UNSET,  # noqa: A002 - the name that 0.3's callers use
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset | None = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Rollout:
        """Change what is given, None included; attempts are not touched. Raises NotFoundError (a ValueError).

        A finished status stamps the end time; queuing or requeuing puts the rollout into the queue again.
        """
        optional = {"mode": mode, "resources_id": resources_id, "config": config, "metadata": metadata}
        update = RolloutUpdate(
            rollout_id=rollout_id,
            input=KEEP if isinstance(input, Unset) else input,
            status=None if isinstance(status, Unset) else status,
            **_given(optional),
        )
        return (await (await self._open()).queue.update_rollouts([update]))[0]

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset | None = UNSET,
        last_heartbeat_time: float | Unset | None = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Attempt:
        """Change what is given, None included, and what follows for the rollout (of its latest attempt) and the worker.

        Raises NotFoundError and UsageError (both are ValueErrors).
        """
        optional = {"worker_id": worker_id, "last_heartbeat_time": last_heartbeat_time, "metadata": metadata}
        update = AttemptUpdate(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            status=None if isinstance(status, Unset) else status,
            **_given(optional),
        )
        return (await (await self._open()).queue.update_attempts([update]))[0]


def _request(
    task: TaskInput, mode: RolloutMode | None, resources_id: str | None, config: RolloutConfig | None, metadata: dict[str, Any] | None
) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(input=task, mode=mode, resources_id=resources_id, config=config, metadata=metadata)


def _given(fields: Mapping[str, object]) -> dict[str, Any]:
    """What an update says of optional fields: values, and the names that become null."""
    given = {name: value for name, value in fields.items() if not isinstance(value, Unset)}
    return {
        **{name: value for name, value in given.items() if value is not None},
        "clear": [n for n, value in given.items() if value is None],
    }
