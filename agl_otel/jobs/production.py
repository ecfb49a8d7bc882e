"""The model servers that answer the users of a running product: the promoted weights, and beside them a canary.

They take turns in two slots, each with a port of its own. Which of them answers whom is a set of resources at the queue, by which the proxy
serves calls of no rollout: publishing it again with the same content changes nothing, so what was interrupted can be repeated.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms.grpo.serving import MODEL_NAME
from agl_otel.errors import ConflictError, ModelServerError, UsageError
from agl_otel.jobs.job import Job
from agl_otel.jobs.policy_server import PolicyServer
from agl_otel.net.http_server import is_healthy
from agl_otel.store import Store
from agl_otel.types import LLM, NamedResources, PromptTemplate, ResourcesUpdate

PROMOTED: Final = "promoted"
"""The resource name of the promoted weights."""
OWNER: Final = "improved_by"
"""The resource name of a text with the id of the run whose set it is."""
HUNG_SECONDS: Final = 30.0
"""A canary whose server does not answer for so long is taken for dead."""
SLOTS: Final = ("a", "b")


class Production:
    """The servers in two slots. `failed` fails when that of the promoted weights ends by itself.

    Args:
        job: says how the policy is served.
        store: a connected store.
        folder: of the slots: their ports, logs, and what they sampled.
        resources_id: of the set of resources.
        sampling: sampling parameters, and options of the resource (LLM) by name.
        owner: the run's id.
    """

    def __init__(
        self, job: Job, store: Store, folder: Path, *, resources_id: str, sampling: dict[str, Any], options: dict[str, Any], owner: str
    ) -> None:
        self._job, self._store, self._folder = job, store, folder
        self._resources_id, self._sampling, self._options = resources_id, sampling, options
        self._owner = owner
        self._answered = 0.0
        self._slot = 0
        self._servers: dict[int, PolicyServer] = {}
        self._watchers: dict[int, asyncio.Task[None]] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._published = False
        self.version = ""
        """Of the published set."""

    async def own(self, *, force: bool) -> None:
        """Raise UsageError if the set is another's; with `force` it is taken over."""
        now = await self._store.resources(self._resources_id)
        self.version = "" if now is None else str(now.version)
        if now is None or force or _owner_of(now) == self._owner:
            return
        whose = f"of the run {owner}" if (owner := _owner_of(now)) else "published by hand"
        raise UsageError(
            f"the set {self._resources_id}, by which users are answered, is {whose}: go on with that (--run-dir), or take it over with "
            "--force; two loops need two stacks"
        )

    async def current(self) -> ResourcesUpdate | None:
        """Return the set. Raises ConflictError if another run has taken it over since this one has published it."""
        now = await self._store.resources(self._resources_id)
        if now is not None and _owner_of(now) != self._owner and self._published:
            raise ConflictError(f"the set {self._resources_id}, by which users are answered, was taken over by {_owner_of(now) or 'hand'}")
        return now

    async def begin(self, model: Path, promotions: int) -> None:
        """Serve the promoted weights, after so many promotions."""
        self._slot = promotions % 2
        await self._start(self._slot, model)

    async def publish(self, canary: str = "", share: float = 0.0) -> None:
        """Say who answers whom: the canary under this name its share of the conversations, the promoted weights all others."""
        now = await self.current()
        llms: NamedResources = {PROMOTED: self._llm(self._slot), OWNER: PromptTemplate(template=self._owner, engine="jinja")}
        if canary:
            llms[canary] = self._llm(1 - self._slot, share=share)
        if now is None or now.resources != llms:
            now = await self._store.publish(llms, resources_id=self._resources_id, aside=True)
        self.version = str(now.version)
        self._published = True

    async def start_canary(self, model: Path) -> None:
        """Start a server of these weights in the free slot."""
        await self._start(1 - self._slot, model)
        self._answered = time.monotonic()

    async def canary_answers(self) -> bool:
        """Whether the canary's server runs, and has answered within HUNG_SECONDS."""
        if not self.canary_runs:
            return False
        if await is_healthy(f"{self._servers[1 - self._slot].url}/health"):
            self._answered = time.monotonic()
        return time.monotonic() - self._answered < HUNG_SECONDS

    @property
    def canary_runs(self) -> bool:
        """Whether the canary's server has not ended."""
        server = self._servers.get(1 - self._slot)
        return server is not None and server.process is not None and server.process.running

    async def promote(self, model: Path) -> None:
        """Let the canary's server answer everybody, and end the other one; the same model again changes nothing."""
        if not self.canary_runs:
            await self.start_canary(model)
        self._slot = 1 - self._slot
        self._watch(self._slot)
        await self.publish()
        await self._stop(1 - self._slot)

    async def withdraw(self) -> None:
        """Let the promoted weights answer everybody, and end the canary's server."""
        await self.publish()
        await self._stop(1 - self._slot)

    async def close(self) -> None:
        """End the servers."""
        for slot in list(self._servers):
            await self._stop(slot)
        self.failed.cancel()
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()

    async def _start(self, slot: int, model: Path) -> None:
        folder = self._folder / SLOTS[slot]
        folder.mkdir(parents=True, exist_ok=True)
        server = PolicyServer(self._job, model, folder, record=folder / "model_server.jsonl", name=f"model server {SLOTS[slot]}")
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
        if slot == self._slot and not self.failed.done():
            self.failed.set_exception(
                ModelServerError(f"the {process.name} ended with exit code {code}; its log is {process.log}. {process.log_end()}")
            )

    async def _stop(self, slot: int) -> None:
        if (watcher := self._watchers.pop(slot, None)) is not None:
            watcher.cancel()
        if (server := self._servers.pop(slot, None)) is not None and server.process is not None:
            await server.process.stop(grace_seconds=server.stop_seconds)

    def _llm(self, slot: int, share: float | None = None) -> LLM:
        endpoint = f"{self._servers[slot].url}/v1"
        return LLM(endpoint=endpoint, model=MODEL_NAME, sampling_parameters=self._sampling, share=share, **self._options)


def _owner_of(update: ResourcesUpdate) -> str:
    owner = update.resources.get(OWNER)
    return owner.template if isinstance(owner, PromptTemplate) else ""
