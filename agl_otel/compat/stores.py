"""Names of Agent Lightning 0.3 for what is one Store here, and errors that say what to use where a name has no meaning any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from agl_otel.errors import UsageError
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.store.store import Store
from agl_otel.types import Span

__all__ = [
    "CollectionBasedLightningStore",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreThreaded",
    "MongoLightningStore",
]
LightningStore = Store


class InMemoryLightningStore(Store):
    """A store with a stack of its own in a temporary folder, which goes away with it. Starts at first use.

    The arguments are 0.3's and change nothing: spans are on disk, so nothing is evicted, and the stack is always safe for threads.
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


class LightningStoreClient(Store):
    """A store on a running stack, at `http://host:4747` or `host:4747`; connects at first use.

    The times are 0.3's and change nothing: calls are tried again for ten seconds while a service is away.
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
    """`store` itself: it is safe for threads already."""
    return store


class _Gone:
    """A class that has no place here; `remedy` says what to use instead."""

    remedy = ""

    def __init__(self, *_: object, **__: object) -> None:
        _refuse(type(self).__name__, self.remedy)


class LightningStoreServer(Store):
    """`store` for other processes and machines, at `http://host:port`; itself the same store.

    A stack of the store's own is started there; one that runs already answers where it is (`endpoint`). Further arguments are 0.3's and
    change nothing.
    """

    def __init__(self, store: Store, host: str | None = None, port: int | None = None, *_: object, **__: object) -> None:
        super().__init__(source=store._source)  # pyright: ignore[reportPrivateUsage]  # both are one store
        self.store = store
        self.host = host or "localhost"
        self.port = port
        self._endpoint = ""

    @property
    def endpoint(self) -> str:
        """The address for LightningStoreClient. Raises UsageError before `start`."""
        if not self._endpoint:
            raise UsageError("the server has no address yet: await server.start() first")
        return self._endpoint

    async def start(self) -> None:
        """Answer. Raises UnavailableError where the stack does not start, as on a port that is taken."""
        address = await asyncio.to_thread(self.store.serve, self.host, self.port)
        async with Store(address, token=self.token) as served:
            self._endpoint = served.description.web or address

    async def run_forever(self) -> None:
        """Answer until it is cancelled."""
        await self.start()
        await asyncio.get_running_loop().create_future()

    async def stop(self) -> None:
        """Nothing more is done with this object; the store's stack answers, and keeps what it holds, until the store is closed."""
        self._endpoint = ""


class CollectionBasedLightningStore(_Gone):
    """0.3's store over collections of the user's own."""

    remedy = "the queue keeps what is intended in SQLite or PostgreSQL (AGL_QUEUE_URL), ClickHouse what was observed (AGL_CLICKHOUSE_URL)"


class MongoLightningStore(_Gone):
    """0.3's store over MongoDB."""

    remedy = "use PostgreSQL: AGL_QUEUE_URL=postgresql://…, then LightningStoreClient with the stack's address"


def _refuse(name: str, remedy: str) -> NoReturn:
    raise UsageError(f"{name} does not exist here: {remedy}")
