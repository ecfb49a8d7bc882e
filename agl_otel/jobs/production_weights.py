"""The model servers of production.py that answer users by weights: the promoted ones, and beside them a canary's.

They take turns in two slots, each with a port of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any, ClassVar, Final

from agl_otel.algorithms.grpo.serving import MODEL_NAME
from agl_otel.errors import ModelServerError, UnavailableError
from agl_otel.jobs.job import Job
from agl_otel.jobs.policy_server import PolicyServer
from agl_otel.jobs.production import PROMOTED, Production
from agl_otel.net.http_server import is_healthy
from agl_otel.service.forkserver import ForkServer
from agl_otel.store import Store
from agl_otel.types import LLM, NamedResources

HUNG_SECONDS: Final = 30.0
"""A canary whose server does not answer for so long is taken for dead."""
SLOTS: Final = ("a", "b")
LINGER_SECONDS: Final = 10.0
"""How long a replaced server runs on before it is ended, so that proxies, which look once a second who answers, have noticed."""
ANSWERS_SECONDS: Final = 120.0
"""How long its answers under way are then waited for."""
LOOK_SECONDS: Final = 5.0
"""What a look at a canary's server that does not answer adds to the time for which it has not, at most: nobody may have looked for long."""


class ServedWeights(Production):
    """The servers in two slots. `failed` fails when that of the promoted weights ends by itself.

    Args:
        job: says how the policy is served.
        store: a connected store.
        folder: of the slots: their ports, logs, and what they sampled.
        sampling: sampling parameters, and options of the resource (LLM) by name.
        forks: as for PolicyServer.
        named: the set's id and owner, as for Production.
    """

    canary_stays: ClassVar[bool] = False
    limits_canary: ClassVar[bool] = True

    def __init__(
        self,
        job: Job,
        store: Store,
        folder: Path,
        *,
        sampling: dict[str, Any],
        options: dict[str, Any],
        forks: ForkServer | None = None,
        **named: str,
    ) -> None:
        super().__init__(store, **named)
        assert job.improve is not None, "improvement_of"
        self._most = job.improve.canary_most
        self._job, self._folder = job, folder
        self._sampling, self._options, self._forks = sampling, options, forks
        if forks is not None:
            forks.on_lost = self._lost
        self._looked = self._silent = 0.0
        self._slot = 0
        self._servers: dict[int, PolicyServer] = {}
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self._retired: dict[int, tuple[PolicyServer, asyncio.Task[None]]] = {}

    def _resources(self, canary: str, share: float) -> NamedResources:
        return {PROMOTED: self._llm(self._slot), **({canary: self._llm(1 - self._slot, share=share)} if canary else {})}

    async def begin(self, promoted: Path, promotions: int) -> None:
        """Start a server of the promoted weights."""
        self._slot = promotions % 2
        await self._start(self._slot, promoted)

    async def start_canary(self, made: Path) -> None:
        """Start a server of these weights in the free slot."""
        await self._start(1 - self._slot, made)
        self._looked, self._silent = time.monotonic(), 0.0

    async def canary_answers(self) -> bool:
        """Whether the canary's server runs, and has answered within HUNG_SECONDS."""
        if not self.canary_runs:
            return False
        well, before = await is_healthy(f"{self._servers[1 - self._slot].url}/health"), self._looked
        self._looked = time.monotonic()
        self._silent = 0.0 if well else self._silent + min(self._looked - before, LOOK_SECONDS)
        return self._silent < HUNG_SECONDS

    @property
    def canary_runs(self) -> bool:
        """Whether the canary's server has not ended."""
        server = self._servers.get(1 - self._slot)
        return server is not None and server.process is not None and server.process.running

    async def promote(self, made: Path) -> None:
        """Let the canary's server answer everybody, and retire the other one; the same model again changes nothing."""
        if not self.canary_runs:
            await self.start_canary(made)
        self._slot = 1 - self._slot
        self._watch(self._slot)
        await self.publish()
        self._retire(1 - self._slot)

    async def withdraw(self) -> None:
        """Let the promoted weights answer everybody, and retire the canary's server."""
        await super().withdraw()
        self._retire(1 - self._slot)

    async def settle(self) -> None:
        """Wait until the servers that were replaced have ended, and the memory of their GPU is free."""
        if self._job.policy.server == "ours" and not self._job.policy.devices:
            return
        await asyncio.gather(*(asyncio.shield(ending) for _, ending in self._retired.values()))

    async def close(self) -> None:
        """End the servers."""
        for slot in list(self._servers):
            self._retire(slot)
        for server, ending in self._retired.values():
            ending.cancel()
            assert server.process is not None, "it was started"
            await server.process.stop(grace_seconds=server.stop_seconds)
        await super().close()

    async def _start(self, slot: int, model: Path) -> None:
        folder = self._folder / SLOTS[slot]
        folder.mkdir(parents=True, exist_ok=True)
        if slot in self._retired:
            await asyncio.shield(self._retired[slot][1])
            del self._retired[slot]
        record, name = folder / "model_server.jsonl", f"model server {SLOTS[slot]}"
        server = PolicyServer(self._job, model, folder, record=record, name=name, forks=self._forks)
        process = await server.prepare()
        await process.start()
        self._servers[slot] = server
        if slot == self._slot:
            self._watch(slot)
        await server.ready()

    def _watch(self, slot: int) -> None:
        self._watchers[slot] = asyncio.create_task(self._watched(slot))

    async def _watched(self, slot: int) -> None:
        process = self._servers[slot].process
        assert process is not None, "it was started"
        code = await process.wait()
        if slot == self._slot:
            self._fail(f"the {process.name} ended with exit code {code}; its log is {process.log}. {process.log_end()}")

    def _lost(self, error: UnavailableError) -> None:
        """Fail before a canary is taken for dead: it ends with the promoted weights' server."""
        self._fail(f"the model servers have ended: {error}")

    def _fail(self, why: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(ModelServerError(why))

    def _retire(self, slot: int) -> None:
        """End a server, if there is one, when nobody asks it any more and what it was asked is answered."""
        if (watcher := self._watchers.pop(slot, None)) is not None:
            watcher.cancel()
        if (server := self._servers.pop(slot, None)) is not None and server.process is not None:
            self._retired[slot] = server, asyncio.create_task(self._end(server), name=f"retire {SLOTS[slot]}")

    async def _end(self, server: PolicyServer) -> None:
        await asyncio.sleep(LINGER_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWERS_SECONDS):
                await server.idle()
        assert server.process is not None, "it was started"
        await server.process.stop(grace_seconds=server.stop_seconds)

    def _llm(self, slot: int, share: float | None = None) -> LLM:
        endpoint = f"{self._servers[slot].url}/v1"
        canary: dict[str, Any] = {} if share is None else {"share": share, "most_conversations": self._most}
        return LLM(endpoint=endpoint, model=MODEL_NAME, sampling_parameters=self._sampling, **canary, **self._options)
