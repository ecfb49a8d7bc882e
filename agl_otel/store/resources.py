"""The store's part for resources."""

from __future__ import annotations

from collections.abc import Mapping

from agl_otel.store.connections import Connected
from agl_otel.types import PromptTemplate, ResourcesUpdate, ResourceUnion

GivenResources = Mapping[str, ResourceUnion | str]
"""{name: resource}; a plain string is an f-string prompt template."""


class Resources(Connected):
    """Named sets of resources in versions."""

    async def publish(self, resources: GivenResources, *, resources_id: str | None = None, aside: bool = False) -> ResourcesUpdate:
        """Publish resources. With the id of earlier ones they become its next version.

        The next rollouts that name none use them, unless they are put `aside`: then only rollouts that name them do. A run puts aside
        what it serves, which is gone when it ends.
        """
        made = {
            name: PromptTemplate(template=given, engine="f-string") if isinstance(given, str) else given
            for name, given in resources.items()
        }
        return await (await self._open()).queue.put_resources(made, resources_id=resources_id, aside=aside)

    async def resources(self, resources_id: str | None = None) -> ResourcesUpdate | None:
        """The current version of a set, or without an id the set published last; None where there is none."""
        return await (await self._open()).queue.get_resources(resources_id)
