"""A real queue inside a test: its own engine and gRPC port, and a clock that the test moves. Nothing is faked but the time."""

from __future__ import annotations

import asyncio
from types import TracebackType

from agl_otel.queue.client import QueueClient
from agl_otel.queue.engine import Engine
from agl_otel.queue.server import QueueServer, open_engine


class ManualClock:
    """Unix seconds that move when told."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds


class LocalQueue:
    """`async with LocalQueue(url) as queue`: `queue.client` speaks to it, `queue.sweep()` is one round of the watchdog."""

    def __init__(self, url: str, *, token: str = "", clock: ManualClock | None = None) -> None:
        self.url = url
        self.clock = clock or ManualClock()
        self._token = token
        self._engine: Engine | None = None
        self._server: QueueServer | None = None
        self._client: QueueClient | None = None

    @property
    def client(self) -> QueueClient:
        """A client of this queue."""
        assert self._client is not None, "the queue is not started: use `async with`"
        return self._client

    @property
    def engine(self) -> Engine:
        """The engine of the running server."""
        assert self._engine is not None, "the queue is not started: use `async with`"
        return self._engine

    @property
    def server(self) -> QueueServer:
        """The running server."""
        assert self._server is not None, "the queue is not started: use `async with`"
        return self._server

    async def until_awaited(self, rollouts: int) -> None:
        """Wait until calls wait for so many rollouts; their first query may be under way."""
        async with asyncio.timeout(300):
            while self.server.service.awaited != rollouts:  # noqa: ASYNC110 - in one loop with the service: a turn each
                await asyncio.sleep(0)

    async def start(self, port: int = 0) -> None:
        """Open the engine and serve on `port` (0: a free one)."""
        self._engine = open_engine(self.url)
        self._server = QueueServer(self._engine, token=self._token, clock=self.clock, sweep_seconds=0)
        address = await self._server.start("127.0.0.1", port)
        self._client = QueueClient(address, token=self._token)

    async def stop(self) -> None:
        """Stop in order."""
        await self.client.close()
        await self.server.stop(grace_seconds=0.5)

    async def restart(self) -> None:
        """Stop, and start again on the same database (and another port)."""
        await self.stop()
        await self.start()

    async def sweep(self, *, after: float = 0.0) -> int:
        """Let `after` seconds pass and run one round of the watchdog; answers how many attempts it gave up."""
        self.clock.advance(after)
        return await self.server.service.sweep()

    async def __aenter__(self) -> LocalQueue:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()
