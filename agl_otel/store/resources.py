"""The part of the store for resources."""

from __future__ import annotations

from collections.abc import Mapping

from agl_otel.store.connections import Connected
from agl_otel.types import PromptTemplate, ResourcesUpdate, ResourceUnion

GivenResources = Mapping[str, ResourceUnion | str]
"""{name: resource}; a plain string becomes an f-string prompt template."""


class Resources(Connected):
    """Named sets of resources with versions."""

    async def publish(self, resources: GivenResources, *, resources_id: str | None = None, aside: bool = False) -> ResourcesUpdate:
        """Publish resources, as the next version of `resources_id` if that exists.

        They become the default for rollouts that name no resources, unless `aside` is set. A run sets it for its own model server, whose
        address is of no use after the run.
        """
        made = {
            name: PromptTemplate(template=given, engine="f-string") if isinstance(given, str) else given
            for name, given in resources.items()
        }
        return await (await self._queue()).put_resources(made, resources_id=resources_id, aside=aside)

    async def resources(self, resources_id: str | None = None) -> ResourcesUpdate | None:
        """Return the current version of a set, or without an id the set published last; None if there is none."""
        return await (await self._queue()).get_resources(resources_id)
