"""The store's part for resources and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agl_otel.errors import NotFoundError
from agl_otel.store.connections import UNSET, Connected, Unset
from agl_otel.types import PaginatedResult, PromptTemplate, ResourcesUpdate, ResourceUnion, Worker, WorkerStatus
from agl_otel.types.queries import FilterLogic, SortOrder

GivenResources = Mapping[str, ResourceUnion | str]
"""{name: resource}; a plain string is an f-string prompt template."""


class Resources(Connected):
    """Named sets of resources in versions. Names, arguments and results are those of Agent Lightning 0.3."""

    async def publish(self, resources: GivenResources, *, resources_id: str | None = None) -> ResourcesUpdate:
        """Publish resources; the next rollouts use them. With the id of earlier ones they become its next version."""
        made = {
            name: PromptTemplate(template=given, engine="f-string") if isinstance(given, str) else given
            for name, given in resources.items()
        }
        return await (await self._open()).queue.put_resources(made, resources_id=resources_id)

    async def add_resources(self, resources: GivenResources) -> ResourcesUpdate:
        """A new set, in version 1."""
        return await self.publish(resources)

    async def update_resources(self, resources_id: str, resources: GivenResources) -> ResourcesUpdate:
        """Replace a set by its next version; an unknown id is created."""
        return await self.publish(resources, resources_id=resources_id)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """The current version of a set; None where there is none."""
        return await (await self._open()).queue.get_resources(resources_id)

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """The set that was written last; None where there is none."""
        return await (await self._open()).queue.get_resources()

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
        """Current versions of the sets that match."""
        return await (await self._open()).queue.query_resources(
            resources_id_in=None if resources_id is None else [resources_id],
            resources_id_contains=resources_id_contains,
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
            offset=offset,
        )


class Workers(Connected):
    """Who runs rollouts. Names, arguments and results are those of Agent Lightning 0.3."""

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
        """Workers that match, by id unless `sort_by` names a field."""
        return await (await self._open()).queue.query_workers(
            status_in=status_in,
            worker_id_contains=worker_id_contains,
            filter_logic=filter_logic,
            sort_by=sort_by,
            sort_order=sort_order,
            limit=limit,
            offset=offset,
        )

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """The worker; None where there is none."""
        return next(iter(await (await self._open()).queue.query_workers(worker_id_in=[worker_id])), None)

    async def update_worker(self, worker_id: str, heartbeat_stats: dict[str, Any] | Unset | None = UNSET) -> Worker:
        """A heartbeat, with stats where they are given; makes the worker known. Its status follows from its attempts alone."""
        stats = None if isinstance(heartbeat_stats, Unset) else heartbeat_stats
        await (await self._open()).queue.heartbeat(worker_id, stats=stats)
        worker = await self.get_worker_by_id(worker_id)
        if worker is None:
            raise NotFoundError(f"worker {worker_id!r} was removed while it reported")
        return worker
