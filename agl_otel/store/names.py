"""Names of Agent Lightning 0.3 for what is one Store here, and errors that say what to use where a name has no meaning any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from agl_otel.errors import UsageError
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.store.store import Store
from agl_otel.types import Span

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


class LightningStoreServer(_Gone):
    """0.3's wrapper that served a store over HTTP: every stack of ours is a server."""

    remedy = "every store here is served already: start one with `agl-otel up` and give its address to LightningStoreClient or AGL_STORE"


class CollectionBasedLightningStore(_Gone):
    """0.3's store over collections of the user's own."""

    remedy = "the queue keeps what is intended in SQLite or PostgreSQL (AGL_QUEUE_URL), ClickHouse what was observed (AGL_CLICKHOUSE_URL)"


class MongoLightningStore(_Gone):
    """0.3's store over MongoDB."""

    remedy = "use PostgreSQL: AGL_QUEUE_URL=postgresql://…, then LightningStoreClient with the stack's address"


def _refuse(name: str, remedy: str) -> NoReturn:
    raise UsageError(f"{name} does not exist here: {remedy}")
