"""The part of the store for resources."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from agl_otel.errors import NotFoundError, UsageError
from agl_otel.proxy.canary import MAX_CONVERSATION, conversation_id, served_to
from agl_otel.settings import Settings
from agl_otel.store.connections import Connected
from agl_otel.types import PromptTemplate, ResourcesUpdate, ResourceUnion, Served

GivenResources = Mapping[str, ResourceUnion | str]
"""{name: resource}; a plain string becomes an f-string prompt template."""


@cache
def _upstream_resources() -> str:
    """Return AGL_UPSTREAM_RESOURCES, read on first use: each conversation asks for it."""
    return Settings.load().upstream_resources


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

    async def served(self, conversation: str, resources_id: str = "") -> Served:
        """Return the prompts that a conversation gets now, and their arm: a canary's share of the conversations gets the canary's.

        The proxy draws the same arm for the calls of the conversation, which it knows by this id (or, of one without an id, by that of its
        trace). Set `arm` as the attribute `agentlightning.served.arm` of the product's span.

        `resources_id`: empty means AGL_UPSTREAM_RESOURCES. Raises UsageError for an id that the proxy does not take, NotFoundError.
        """
        if (known := conversation_id(conversation)) is None:
            raise UsageError(f"conversation {conversation[:40]!r}: its id has 1 to {MAX_CONVERSATION} characters, all of which print")
        name = resources_id or _upstream_resources()
        if (update := await self.resources(name)) is None:
            raise NotFoundError(f"there is no set of resources {name!r}")
        return served_to(update, known)
