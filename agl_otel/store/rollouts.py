"""The part of the store for rollouts and attempts: what is intended."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from agl_otel.queue.client import RolloutUpdate
from agl_otel.store.connections import Connected
from agl_otel.types import (
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    PaginatedResult,
    Rollout,
    RolloutQuery,
    RolloutStatus,
)

OUTPUTS_SEARCHED: Final = 500
"""Most rollouts whose outputs are searched for a text."""


class Rollouts(Connected):
    """Rollouts and attempts."""

    labels: Mapping[str, str] = MappingProxyType({})
    """Added to the labels of each rollout that is enqueued or started through this object."""

    async def enqueue(self, tasks: Sequence[Any], *, idempotency_key: str | None = None, **common: Any) -> list[Rollout]:
        """Queue one rollout for each task, in order.

        Args:
            tasks: EnqueueRolloutRequests, or plain inputs (any JSON) that become requests with the `common` fields.
            idempotency_key: a repeated key returns the same rollouts instead of new ones.
            common: fields of EnqueueRolloutRequest for plain inputs (`mode`, `resources_id`, `config`, `metadata`, …).
        """
        requests = [t if isinstance(t, EnqueueRolloutRequest) else EnqueueRolloutRequest(input=t, **common) for t in tasks]
        return await (await self._queue()).enqueue(self._labelled(requests), idempotency_key=idempotency_key)

    def _labelled(self, requests: Sequence[EnqueueRolloutRequest]) -> Sequence[EnqueueRolloutRequest]:
        if not self.labels:
            return requests
        return [request.model_copy(update={"labels": {**(request.labels or {}), **self.labels}}) for request in requests]

    async def rollouts(self, query: RolloutQuery) -> PaginatedResult[Rollout | AttemptedRollout]:
        """Return the matching rollouts with their latest attempts."""
        if not query.output_contains:
            return await (await self._queue()).query_rollouts(query)
        connection = await self._open()
        looked = await connection.queue.query_rollouts(query, output_contains=None, limit=OUTPUTS_SEARCHED, offset=0)
        attempts = [each.attempt for each in looked if isinstance(each, AttemptedRollout)]
        matching = await connection.reader.outputs_containing(attempts, query.output_contains)
        found = [each for each in looked if each.rollout_id in matching]
        page = found[max(query.offset, 0) :][: query.limit if query.limit >= 0 else None]
        searched = len(looked) if looked.total > len(looked) else None
        return PaginatedResult(page, query.limit, query.offset, len(found), searched=searched)

    async def rollout(self, rollout_id: str) -> Rollout | AttemptedRollout | None:
        """Return the rollout with its latest attempt; None if it does not exist."""
        return next(iter(await self.rollouts(RolloutQuery(rollout_id_in=[rollout_id]))), None)

    async def wait(self, rollout_ids: Sequence[str], *, timeout_seconds: float | None = None) -> list[Rollout | AttemptedRollout]:
        """Wait until all have finished or the time is up; return the finished ones in the given order. Unknown ids are ignored."""
        done = {rollout.rollout_id: rollout async for rollout in self.watch(rollout_ids, timeout_seconds=timeout_seconds)}
        return [done[rollout_id] for rollout_id in rollout_ids if rollout_id in done]

    async def watch(
        self, rollout_ids: Sequence[str], *, timeout_seconds: float | None = None
    ) -> AsyncGenerator[Rollout | AttemptedRollout, None]:
        """Yield each rollout as it finishes, until all have or the time is up. Unknown ids are ignored."""
        async for finished in (await self._queue()).wait(rollout_ids, timeout_seconds=timeout_seconds):
            for rollout in finished:
                yield rollout

    async def attempts(self, rollout_ids: str | Sequence[str]) -> list[Attempt]:
        """Return all attempts of the rollouts, by rollout and number; unknown rollouts have none."""
        ids = [rollout_ids] if isinstance(rollout_ids, str) else rollout_ids
        return list(await (await self._queue()).query_attempts(ids)) if ids else []

    async def set_status(self, rollout_ids: Sequence[str], status: RolloutStatus) -> list[Rollout]:
        """Set the status of rollouts: `cancelled` ends them, `requeuing` queues them again. Attempts are not touched.

        Raises NotFoundError, and then changes nothing.
        """
        updates = [RolloutUpdate(rollout_id=rollout_id, status=status) for rollout_id in rollout_ids]
        return list(await (await self._queue()).update_rollouts(updates)) if updates else []
