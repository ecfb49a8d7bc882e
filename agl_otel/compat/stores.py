"""0.3's store classes, all of them one Store here; a class that does not exist any more raises UsageError with its replacement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Self

from agl_otel.compat.lightning_store import UNSET, LightningStore, LightningStoreCapabilities
from agl_otel.errors import UsageError
from agl_otel.store.connections import Statistics
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.store.store import Store
from agl_otel.types import Span

__all__ = [
    "CollectionBasedLightningStore",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "MongoLightningStore",
    "UNSET",
]
LightningStoreStatistics = Statistics


class InMemoryLightningStore(LightningStore):
    """A store with its own stack in a temporary folder, which is deleted with it. Starts on first use.

    The arguments are 0.3's and have no effect: spans are on disk, so nothing is evicted, and the stack is always thread-safe.
    """

    def __init__(
        self,
        *,
        thread_safe: bool = True,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        span_size_estimator: Callable[[Span], int] | None = None,
        tracker: Any = None,
        scan_debounce_seconds: float = 10.0,
    ) -> None:
        super().__init__(source=EmbeddedStack())

    async def __aenter__(self) -> Self:
        await self._queue()  # the collector starts when a span or a read needs it
        return self


class LightningStoreClient(LightningStore):
    """A store on a running stack, at `http://host:4747` or `host:4747`; connects on first use.

    The times are 0.3's and have no effect: calls are retried for ten seconds while a service is unavailable.
    """

    def __init__(
        self,
        server_address: str,
        *,
        retry_delays: Sequence[float] = (),
        health_retry_delays: Sequence[float] = (),
        request_timeout: float = 30.0,
        connection_timeout: float = 5.0,
    ) -> None:
        super().__init__(server_address)
        self.server_address = server_address
        """As it was given."""


def LightningStoreThreaded(store: Store) -> Store:  # noqa: N802 - the name of a class in 0.3
    """Return `store` itself, which is thread-safe."""
    return store


class _Removed:
    """Base of classes that do not exist any more; `remedy` names the replacement."""

    remedy = ""

    def __init__(self, *_: object, **__: object) -> None:
        _refuse(type(self).__name__, self.remedy)


class LightningStoreServer(LightningStore):
    """Serves `store` to other processes and machines at `http://host:port`; is a Store itself, with the same content.

    The store's own stack is started at that address; a stack that runs already keeps its address (`endpoint`). Further arguments are
    0.3's and have no effect.
    """

    def __init__(self, store: LightningStore, host: str | None = None, port: int | None = None, *_: object, **__: object) -> None:
        super().__init__(source=store._source)  # pyright: ignore[reportPrivateUsage]  # both are one store
        self.store = store
        self.host = host or "localhost"
        self.port = port
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """Address for LightningStoreClient. Raises UsageError before `start`."""
        if not self._endpoint:
            raise UsageError("the server has no address yet: await server.start() first")
        return self._endpoint

    async def start(self) -> None:
        """Start to serve. Raises UnavailableError if the stack does not start, for example because the port is in use."""
        address = await asyncio.to_thread(self.store.serve, self.host, self.port)
        async with Store(address, token=self.token) as served:
            self._endpoint = served.description.web or address

    async def run_forever(self) -> None:
        """Serve until cancelled."""
        await self.start()
        await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        """Forget the endpoint. The store's stack keeps running, with its data, until the store is closed."""
        self._endpoint = ""


class CollectionBasedLightningStore(_Removed):
    """0.3's store over the user's own collections."""

    remedy = "rollouts are stored in SQLite or PostgreSQL (AGL_QUEUE_URL), spans in ClickHouse (AGL_CLICKHOUSE_URL)"


class MongoLightningStore(_Removed):
    """0.3's store over MongoDB."""

    remedy = "use PostgreSQL: AGL_QUEUE_URL=postgresql://…, then LightningStoreClient with the stack's address"


def _refuse(name: str, remedy: str) -> NoReturn:
    raise UsageError(f"{name} does not exist here: {remedy}")
