"""Which model server a rollout's calls go to: the LLM among the resources that are pinned to the rollout, looked up in the queue."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from agl_otel.errors import NotFoundError
from agl_otel.types import LLM, NamedResources, PaginatedResult, ProxyLLM, ResourcesUpdate, Rollout

MAX_CACHED: Final = 50_000


@dataclass(frozen=True, slots=True)
class Upstream:
    """A model server as the proxy calls it."""

    base_url: str
    """Without a trailing slash; `/chat/completions` follows."""
    model: str | None = None
    """None: whatever the agent asks for."""
    api_key: str | None = field(default=None, repr=False)
    """None: the agent's own."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    version: str | None = None
    """The version of the resources: of the weights, where the server does not say."""


class Upstreams(Protocol):
    """Finds upstreams."""

    async def resolve(self, rollout_id: str | None) -> Upstream:
        """The upstream of a rollout's calls, or of calls of no rollout. Raises NotFoundError, UnavailableError."""
        ...


class Queue(Protocol):
    """What of the queue's client is needed here."""

    async def query_rollouts(self, *, rollout_id_in: Sequence[str]) -> PaginatedResult[Rollout]:
        """Rollouts by id."""
        ...

    async def get_resources(self, resources_id: str | None = None, *, version: int | None = None) -> ResourcesUpdate | None:
        """One version of a set of resources."""
        ...


class FixedUpstreams:
    """One upstream for every call."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def resolve(self, rollout_id: str | None) -> Upstream:
        """The upstream."""
        return self._upstream


class QueueUpstreams:
    """Asks the queue, once for each rollout; calls of no rollout go to `fallback_url`.

    `fallback_key` is that server's, also for resources that name it without a key: so a person's own key need not be published.
    """

    def __init__(self, queue: Queue, *, fallback_url: str = "", fallback_key: str = "", own_urls: Collection[str] = ()) -> None:
        self._queue = queue
        self._fallback = Upstream(fallback_url.rstrip("/"), api_key=fallback_key or None) if fallback_url else None
        self._own_urls = tuple(own_urls)
        self._by_rollout: OrderedDict[str, asyncio.Task[Upstream]] = OrderedDict()
        self._by_version: dict[tuple[str | None, int | None], Upstream] = {}

    async def resolve(self, rollout_id: str | None) -> Upstream:
        """The upstream of a rollout's calls, or of calls of no rollout. Raises NotFoundError, UnavailableError."""
        if rollout_id is None:
            if self._fallback is None:
                raise NotFoundError(
                    "this call names no rollout: use the base URL that the runner gives (/rollout/…/attempt/…/v1), send the ids as W3C "
                    "baggage, or set AGL_UPSTREAM_URL for calls of no rollout"
                )
            return self._fallback
        task = self._by_rollout.get(rollout_id)
        if task is None:
            task = self._by_rollout[rollout_id] = asyncio.create_task(self._ask(rollout_id))
            if len(self._by_rollout) > MAX_CACHED:
                self._by_rollout.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._by_rollout.pop(rollout_id, None)  # ask again with the next call
            raise

    async def _ask(self, rollout_id: str) -> Upstream:
        found = await self._queue.query_rollouts(rollout_id_in=[rollout_id])
        if not len(found):
            raise NotFoundError(f"the queue knows no rollout {rollout_id}: was it deleted, or does the proxy serve another stack?")
        rollout: Rollout = found[0]
        pinned = (rollout.resources_id, rollout.resources_version)
        upstream = self._by_version.get(pinned)
        if upstream is None:
            update = await self._queue.get_resources(rollout.resources_id, version=rollout.resources_version)
            llm = choose(update.resources, self._own_urls) if update is not None else None
            if update is None or llm is None:
                raise NotFoundError(
                    f"rollout {rollout_id} has no LLM among its resources ({rollout.resources_id} version {rollout.resources_version}): "
                    "publish an LLM whose endpoint is the model server"
                )
            endpoint = llm.endpoint.rstrip("/")
            own_key = self._fallback.api_key if self._fallback and endpoint == self._fallback.base_url else None
            upstream = Upstream(endpoint, llm.model or None, llm.api_key or own_key or "", llm.sampling_parameters, str(update.version))
            if rollout.resources_id is not None and rollout.resources_version is not None:
                if len(self._by_version) > MAX_CACHED:
                    self._by_version.clear()
                self._by_version[pinned] = upstream
        return upstream


def choose(resources: NamedResources, own_urls: Collection[str]) -> LLM | ProxyLLM | None:
    """The first LLM that is a real model server and not this proxy."""
    llms = (resource for resource in resources.values() if isinstance(resource, (LLM, ProxyLLM)))
    return next((llm for llm in llms if not any(llm.endpoint.startswith(url) for url in own_urls)), None)
