"""The store of Agent Lightning 0.3: its 29 methods, over those of Store, with its names, arguments and results."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, final

from agl_otel.errors import NotFoundError
from agl_otel.queue.client import KEEP, AttemptUpdate, RolloutUpdate
from agl_otel.store.connections import CONNECTIONS, Connected, Connection
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.store.otlp import TRACES_PATH
from agl_otel.store.resources import GivenResources
from agl_otel.store.store import Store
from agl_otel.traces.span_query import BOOKKEEPING, SpanQuery
from agl_otel.types import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Describe,
    EnqueueRolloutRequest,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutQuery,
    RolloutStatus,
    Span,
    TaskInput,
    Worker,
    WorkerStatus,
)
from agl_otel.types.queries import FilterLogic, SortOrder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

LATEST: Final = "latest"


@final
class Unset:
    """The type of UNSET; a singleton, also after unpickling."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNSET"

    def __reduce__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()
"""Default of arguments for which None is a value."""


class LightningStoreCapabilities(TypedDict, total=False):
    """Capabilities of a store."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    """Whether copies of the object in other processes use the same data."""
    otlp_traces: bool
    """Whether it accepts OTLP (`otlp_traces_endpoint`)."""


class LightningStore(Store):
    """A Store with the methods of Agent Lightning 0.3: their names, arguments and results."""

    @staticmethod
    def over(store: Store) -> LightningStore:
        """Return `store` if it has these methods, else a LightningStore on the same stack."""
        return store if isinstance(store, LightningStore) else LightningStore(source=store._source)

    def __getattr__(self, name: str) -> Any:
        """Start a private stack for a subclass that does not call `__init__`, which 0.3's base class did not have."""
        if name not in CONNECTIONS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        Connected.__init__(self, EmbeddedStack())
        return vars(self)[name]

    # --- rollouts and attempts

    async def start_rollout(
        self,
        input: TaskInput,  # noqa: A002 - the name that 0.3's callers use
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        """Start a rollout that is never queued, with a first attempt of `worker_id`, by default with the latest resources."""
        request = _request(input, mode, resources_id, config, metadata)
        return (await (await self._queue()).start(self._labelled([request]), worker_id=worker_id))[0]

    async def enqueue_rollout(
        self,
        input: TaskInput,  # noqa: A002 - the name that 0.3's callers use
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Rollout:
        """Put one rollout at the end of the queue, by default with the latest resources."""
        return (await self.enqueue([_request(input, mode, resources_id, config, metadata)]))[0]

    async def enqueue_many_rollouts(self, rollouts: Sequence[EnqueueRolloutRequest]) -> list[Rollout]:
        """Put rollouts at the end of the queue, in order."""
        return await self.enqueue(rollouts)

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """Claim the next rollout; return None at once if there is none."""
        claimed = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return claimed[0] if claimed else None

    async def dequeue_many_rollouts(self, *, limit: int = 1, worker_id: str | None = None) -> list[AttemptedRollout]:
        """Claim up to `limit` rollouts with the store's `labels`, the oldest first, without waiting; each has a new attempt."""
        return await (await self._queue()).claim(limit, worker_id=worker_id, labels=self.labels) if limit > 0 else []

    async def start_attempt(self, rollout_id: str, worker_id: str | None = None) -> AttemptedRollout:
        """Start a further attempt, regardless of max_attempts. Raises NotFoundError (a ValueError)."""
        return (await (await self._queue()).start_attempt([rollout_id], worker_id=worker_id))[0]

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
        """Query rollouts; `status` and `rollout_ids` are older names of `status_in` and `rollout_id_in`."""
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

    async def get_rollout_by_id(self, rollout_id: str) -> Rollout | AttemptedRollout | None:
        """Return the rollout with its latest attempt; None if it does not exist."""
        return await self.rollout(rollout_id)

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Return the attempts of a rollout; empty if the rollout does not exist."""
        queue = await self._queue()
        return await queue.query_attempts([rollout_id], sort_by=sort_by, sort_order=sort_order, limit=limit, offset=offset)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the attempt with the highest number; None if there is none."""
        return next(iter(await (await self._queue()).query_attempts([rollout_id], latest_only=True)), None)

    async def wait_for_rollouts(self, rollout_ids: Sequence[str], timeout: float | None = None) -> list[Rollout | AttemptedRollout]:
        """Wait for rollouts, at most `timeout` seconds (0: do not wait); return the finished ones, in the given order."""
        return await self.wait(rollout_ids, timeout_seconds=timeout)

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
        """Set the given fields, also to None; attempts are not changed. Raises NotFoundError (a ValueError).

        A finished status stamps the end time; queuing or requeuing puts the rollout into the queue again.
        """
        optional = {"mode": mode, "resources_id": resources_id, "config": config, "metadata": metadata}
        update = RolloutUpdate(
            rollout_id=rollout_id,
            input=KEEP if isinstance(input, Unset) else input,
            status=None if isinstance(status, Unset) else status,
            **_given(optional),
        )
        return (await (await self._queue()).update_rollouts([update]))[0]

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"],
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset | None = UNSET,
        last_heartbeat_time: float | Unset | None = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
    ) -> Attempt:
        """Set the given fields, also to None; update the worker and, for its latest attempt, the rollout accordingly.

        Raises NotFoundError and UsageError (both are ValueErrors).
        """
        optional = {"worker_id": worker_id, "last_heartbeat_time": last_heartbeat_time, "metadata": metadata}
        update = AttemptUpdate(
            rollout_id=rollout_id,
            attempt_id=attempt_id,
            status=None if isinstance(status, Unset) else status,
            **_given(optional),
        )
        return (await (await self._queue()).update_attempts([update]))[0]

    # --- spans

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Return the next number of the rollout's counter, which its attempts share; the first is 1."""
        return (await self.get_many_span_sequence_ids([(rollout_id, attempt_id)]))[0]

    async def get_many_span_sequence_ids(self, rollout_attempt_ids: Sequence[tuple[str, str]]) -> list[int]:
        """Return the next number for each of these (rollout id, attempt id), in order."""
        asked = [(rollout_id, 1, 0) for rollout_id, _ in rollout_attempt_ids]
        return await (await self._queue()).take_sequence(asked) if asked else []

    async def add_span(self, span: Span) -> Span | None:
        """Store a span, visible to queries when this returns; return None if it is stored already. Raises what `add_spans` raises."""
        return next(iter(await self.add_many_spans([span])), None)

    async def add_many_spans(self, spans: Sequence[Span]) -> list[Span]:
        """Store spans; return the new ones, in order. Raises what `add_spans` raises.

        A span with an id of zeros, which OpenTelemetry cannot carry, gets random ids.
        """
        return await self.add_spans([_with_ids(span) for span in spans])

    async def add_otel_span(
        self, rollout_id: str, attempt_id: str, readable_span: ReadableSpan, sequence_id: int | None = None
    ) -> Span | None:
        """Store a span of the OpenTelemetry SDK, by default with the next number; return None if it is stored already."""
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id))

    async def query_spans(
        self,
        rollout_id: str,
        attempt_id: str | Literal["latest"] | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: SortOrder = "asc",
        everything: bool = False,
    ) -> PaginatedResult[Span]:
        """Query spans of a rollout, or of one attempt, including all that were acknowledged before this call. `limit` below 0 means all.

        The root span of an attempt and seals are left out unless `everything` is set.
        """
        if attempt_id == LATEST:
            latest = await self.get_latest_attempt(rollout_id)
            if latest is None:
                return PaginatedResult([], limit, offset, 0)
            attempt_id = latest.attempt_id
        query = SpanQuery(
            rollout_id=rollout_id,
            attempt_id=attempt_id or "",
            trace_id=trace_id,
            trace_id_contains=trace_id_contains,
            span_id=span_id,
            span_id_contains=span_id_contains,
            parent_id=parent_id,
            parent_id_contains=parent_id_contains,
            name=name,
            name_contains=name_contains,
            filter_logic=filter_logic,
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
            offset=offset,
            hidden=() if everything else BOOKKEEPING,
        )
        return await self.find_spans(query)

    # --- resources and workers

    async def add_resources(self, resources: GivenResources) -> ResourcesUpdate:
        """Add a set of resources, in version 1."""
        return await self.publish(resources)

    async def update_resources(self, resources_id: str, resources: GivenResources) -> ResourcesUpdate:
        """Add the next version of a set of resources; an unknown id is created."""
        return await self.publish(resources, resources_id=resources_id)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """Return the current version of a set of resources; None if it does not exist."""
        return await (await self._queue()).get_resources(resources_id)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the set of resources that was written last; None if there is none."""
        return await (await self._queue()).get_resources()

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        """Query sets of resources, in their current versions."""
        return await (await self._queue()).query_resources(
            resources_id_in=None if resources_id is None else [resources_id],
            resources_id_contains=resources_id_contains,
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
            offset=offset,
        )

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: FilterLogic = "and",
        sort_by: str | None = None,
        sort_order: SortOrder = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        """Query workers, sorted by id unless `sort_by` names a field."""
        return await (await self._queue()).query_workers(
            status_in=status_in,
            worker_id_contains=worker_id_contains,
            filter_logic=filter_logic,
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
            offset=offset,
        )

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return the worker; None if it does not exist."""
        return next(iter(await (await self._queue()).query_workers(worker_id_in=[worker_id])), None)

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset | None = UNSET) -> Worker:
        """Send a heartbeat of a worker, which registers it, with optional statistics. Its status depends on its attempts only."""
        stats = None if isinstance(heartbeat_stats, Unset) else heartbeat_stats
        await (await self._queue()).heartbeat(worker_id, stats=stats)
        worker = await self.get_worker_by_id(worker_id)
        if worker is None:
            raise NotFoundError(f"worker {worker_id!r} was removed while it reported")
        return worker

    # --- the stack

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """All capabilities that 0.3 knows."""
        return {"thread_safe": True, "async_safe": True, "zero_copy": True, "otlp_traces": True}

    def otlp_traces_endpoint(self) -> str:
        """The URL for OTLP over HTTP (…/v1/traces). Raises NotImplementedError if the stack has no collector."""
        found: list[Describe] = []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(self._describe())))  # a running loop cannot be entered again
        thread.start()
        thread.join()
        if not found or found[0].collector_http is None:
            raise NotImplementedError("this stack has no collector that takes OTLP over HTTP: start one with `agl-otel up`")
        return found[0].collector_http + TRACES_PATH

    async def _describe(self) -> Describe:
        connection = await Connection.open(self._source.address(), self._source.token)
        try:
            return connection.description
        finally:
            await connection.close()


def _request(
    task: TaskInput, mode: RolloutMode | None, resources_id: str | None, config: RolloutConfig | None, metadata: dict[str, Any] | None
) -> EnqueueRolloutRequest:
    return EnqueueRolloutRequest(input=task, mode=mode, resources_id=resources_id, config=config, metadata=metadata)


def _with_ids(span: Span) -> Span:
    if span.trace_id.strip("0") and span.span_id.strip("0"):
        return span
    return span.model_copy(update={"trace_id": os.urandom(16).hex(), "span_id": os.urandom(8).hex(), "context": None})


def _given(fields: Mapping[str, object]) -> dict[str, Any]:
    """Split an update of optional fields into values and the names of fields to set to null."""
    given = {name: value for name, value in fields.items() if not isinstance(value, Unset)}
    return {
        **{name: value for name, value in given.items() if value is not None},
        "clear": [n for n, value in given.items() if value is None],
    }
