"""The Store: its parts put together, and the ways to get one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from agl_otel.errors import UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.service.ports import is_free, port_beside
from agl_otel.store.address import Address
from agl_otel.store.connections import CONNECTIONS, Connected, Source, Statistics
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.store.figures import Figures
from agl_otel.store.resources import Resources
from agl_otel.store.rollouts import Rollouts
from agl_otel.store.spans import Spans
from agl_otel.store.steps import Steps
from agl_otel.traces.reader import TraceReader
from agl_otel.types import Describe

DEFAULT_PORT: Final = 4747
SERVED: Final = ("queue", "collector", "proxy", "web")


class Store(Rollouts, Spans, Resources, Figures, Steps):
    """One store over one stack. `Store(address)` connects at its first use, `await Store.connect(address)` at once.

    It may be used from several event loops and threads, and pickled: a copy speaks to the same stack.

    Args:
        address: the queue's gRPC address (`host:4747`) or the web service's HTTP address (`http://host:4748`); empty means
            AGL_STORE at first use.
        token: bearer token of the stack; empty means AGL_TOKEN.
        source: instead of an address, something that knows or makes one.
    """

    def __init__(self, address: str = "", *, token: str = "", source: Source | None = None) -> None:
        Connected.__init__(self, source if source is not None else Address(address, token))

    @classmethod
    async def connect(cls, address: str = "", *, token: str = "") -> Self:
        """A store that is connected to a running stack. Raises UsageError (no or a malformed address), UnavailableError."""
        store = _copy_of(cls, {}, Address(address, token))
        await store._open()
        return store

    @classmethod
    def embedded(cls, data_dir: str | Path) -> Self:
        """A store with a stack of its own on `data_dir`, started at first use and ended by `close`, or with this process.

        Where a stack runs on that folder already, it is used and left running.
        """
        return _copy_of(cls, {}, EmbeddedStack(Path(data_dir)))

    async def open(self) -> Self:
        """Connect in the running loop, where that has not happened yet. Raises UsageError (no or a malformed address), UnavailableError."""
        await self._open()
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def at(self, address: str) -> Self:
        """The same, of its own class and with its attributes, over the stack that runs at `address`."""
        return _copy_of(
            type(self), {name: value for name, value in vars(self).items() if name not in CONNECTIONS}, Address(address, self.token)
        )

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Any, ...]]:
        return _copy_of, (type(self), self._own(), Address(self._source.address(), self._source.token))

    def _own(self) -> dict[str, Any]:
        """Attributes that a subclass has added."""
        return {name: value for name, value in vars(self).items() if name not in CONNECTIONS}

    # --- the stack behind it

    @property
    def token(self) -> str:
        """The bearer token of the stack; empty means none."""
        return self._source.token

    @property
    def queue(self) -> QueueClient:
        """The queue's client, for the running loop. Raises UsageError before the first use."""
        return self._now_open().queue

    @property
    def reader(self) -> TraceReader:
        """The reader of traces, for the running loop. Raises UsageError before the first use."""
        return self._now_open().reader

    @property
    def description(self) -> Describe:
        """Where the services of the stack are. Raises UsageError before the first use."""
        return self._now_open().description

    @description.setter
    def description(self, description: Describe) -> None:
        self._now_open().description = description

    async def statistics(self) -> Statistics:
        """How much there is; `total_spans` counts stored rows."""
        connection = await self._open()
        counts, spans = await asyncio.gather(connection.queue.statistics(), connection.reader.count())
        return {**counts, "total_spans": spans}  # pyright: ignore[reportReturnType]  # counts is a dict with these keys

    def serve(self, host: str, port: int | None = None, *, strict: bool = False) -> str:
        """Have a stack of the store's own answer at host:port for other processes and machines; the address for them.

        A stack that runs already is where it is. `port` None means 4747, or, unless `strict`, a free one where that is taken. Blocks.
        Raises UsageError where the store's own stack runs already and `strict` asks for another address, UnavailableError.
        """
        source = self._source
        if not isinstance(source, EmbeddedStack):
            return source.address()
        if source.running:
            if strict:
                raise UsageError(
                    f"the store's stack runs already, and not at {host}:{port or DEFAULT_PORT}: "
                    "do not use the store before fit, or start one with `agl-otel store` and give its client"
                )
            return source.address()
        host = "127.0.0.1" if host == "localhost" else host
        chosen = DEFAULT_PORT if port is None else port
        if port is None and not strict and not is_free(host, DEFAULT_PORT):
            chosen = 0
        source.configure(services=SERVED, host=host, web_port=chosen, queue_port=port_beside(host, chosen))
        return source.address()


S = TypeVar("S", bound=Store)


def _copy_of(kind: type[S], own: dict[str, Any], source: Source) -> S:
    made = kind.__new__(kind)
    vars(made).update(own)
    Connected.__init__(made, source)
    return made
