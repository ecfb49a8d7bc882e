"""The Store: the combination of its parts, and its constructors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from agl_otel.errors import UsageError
from agl_otel.queue.client import QueueClient
from agl_otel.service.ports import is_free, port_beside
from agl_otel.store.address import Address
from agl_otel.store.connections import CONNECTIONS, Connected, Source, Statistics
from agl_otel.store.embedded import EmbeddedStack
from agl_otel.store.feedback import Feedbacks
from agl_otel.store.figures import Figures
from agl_otel.store.judge_calls import JudgeCalls
from agl_otel.store.rollouts import Rollouts
from agl_otel.store.rubrics import Rubrics
from agl_otel.store.selections import Selections
from agl_otel.store.spans import Spans
from agl_otel.store.steps import Steps
from agl_otel.types import Describe

if TYPE_CHECKING:
    from agl_otel.traces.reader import TraceReader

DEFAULT_PORT: Final = 4747
SERVED: Final = ("queue", "collector", "proxy", "web")


class Store(Rollouts, Spans, Feedbacks, JudgeCalls, Rubrics, Selections, Figures, Steps):
    """A store over one stack. `Store(address)` connects on first use, `await Store.connect(address)` at once.

    It may be used from several event loops and threads, and pickled: a copy uses the same stack.

    Args:
        address: the queue's gRPC address (`host:4747`) or the web service's HTTP address (`http://host:4748`); empty: AGL_STORE, read
            on first use.
        token: bearer token of the stack; empty: AGL_TOKEN.
        source: instead of an address, an object that knows a stack or starts one.
    """

    def __init__(self, address: str = "", *, token: str = "", source: Source | None = None) -> None:
        Connected.__init__(self, source if source is not None else Address(address, token))

    @classmethod
    async def connect(cls, address: str = "", *, token: str = "") -> Self:
        """Connect to a running stack. Raises UsageError (no or a malformed address), UnavailableError."""
        store = _copy_of(cls, {}, Address(address, token))
        await store._open()
        return store

    @classmethod
    def embedded(cls, data_dir: str | Path) -> Self:
        """Return a store with a private stack on `data_dir`, started on first use and stopped by `close` or with this process.

        A stack that already runs on that folder is used instead, and a stack that others use then goes on until the last of them ends.
        """
        return _copy_of(cls, {}, EmbeddedStack(Path(data_dir)))

    async def open(self) -> Self:
        """Connect in the running loop, if not done yet. Raises UsageError (no or a malformed address), UnavailableError."""
        await self._open()
        return self

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    def at(self, address: str) -> Self:
        """Return a copy, of the same class and with the same attributes, over the stack at `address`."""
        return _copy_of(type(self), self._own(), Address(address, self.token))

    def labelled(self, labels: Mapping[str, str]) -> Self:
        """Return a copy over the same stack, which stays running when the copy is closed, with these `labels`."""
        made = self.at(self._source.address())
        made.labels = dict(labels)
        return made

    def __reduce__(self) -> tuple[Callable[..., Store], tuple[Any, ...]]:
        return _copy_of, (type(self), self._own(), Address(self._source.address(), self._source.token))

    def _own(self) -> dict[str, Any]:
        """The attributes that a subclass has added."""
        return {name: value for name, value in vars(self).items() if name not in CONNECTIONS}

    # --- the stack behind it

    @property
    def token(self) -> str:
        """The bearer token of the stack; empty means none."""
        return self._source.token

    @property
    def queue(self) -> QueueClient:
        """The queue's client for the running loop. Raises UsageError before the first use."""
        return self._now_open().queue

    @property
    def reader(self) -> TraceReader:
        """The reader of traces for the running loop. Raises UsageError before the first use."""
        return self._now_open().reader

    @property
    def description(self) -> Describe:
        """The addresses of the stack's services. Raises UsageError before the first use."""
        return self._now_open().description

    @description.setter
    def description(self, description: Describe) -> None:
        self._now_open().description = description

    async def statistics(self) -> Statistics:
        """Return the counts of the store; `total_spans` counts stored rows."""
        connection = await self._open()
        counts, spans = await asyncio.gather(connection.queue.statistics(), connection.reader.count())
        return {**counts, "total_spans": spans}  # pyright: ignore[reportReturnType]  # counts is a dict with these keys

    def serve(self, host: str, port: int | None = None, *, strict: bool = False) -> str:
        """Make a private stack listen at host:port for other processes and machines; return the address for them.

        A running stack keeps its address. `port` None means 4747 or, unless `strict`, a free one if that is taken. Blocks. Raises
        UsageError if the private stack already runs and `strict` demands another address, UnavailableError.
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
