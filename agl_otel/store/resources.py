"""The store's part for resources."""

from __future__ import annotations

from collections.abc import Mapping

from agl_otel.store.connections import Connected
from agl_otel.types import PromptTemplate, ResourcesUpdate, ResourceUnion

GivenResources = Mapping[str, ResourceUnion | str]
"""{name: resource}; a plain string is an f-string prompt template."""


class Resources(Connected):
    """Named sets of resources in versions."""

    async def publish(self, resources: GivenResources, *, resources_id: str | None = None) -> ResourcesUpdate:
        """Publish resources; the next rollouts use them. With the id of earlier ones they become its next version."""
        made = {
            name: PromptTemplate(template=given, engine="f-string") if isinstance(given, str) else given
            for name, given in resources.items()
        }
        return await (await self._open()).queue.put_resources(made, resources_id=resources_id)

    async def resources(self, resources_id: str | None = None) -> ResourcesUpdate | None:
        """The current version of a set, or without an id the set published last; None where there is none."""
        return await (await self._open()).queue.get_resources(resources_id)
