"""Who answers the users of a running product, and by which prompts: a set of resources at the queue. It is the loop's (improve.py) alone.

By this set the proxy serves calls of no rollout, and products ask for their prompts. Publishing it again with the same content changes
nothing, so what was interrupted can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import ClassVar, Final, TypeVar

from agl_otel.errors import ConflictError, UnavailableError, UsageError
from agl_otel.service.retry import QUICK, Tries
from agl_otel.store import Store
from agl_otel.types import NamedResources, PromptTemplate, ResourcesUpdate
from agl_otel.types.resources import OWNER, shares_in

PROMOTED: Final = "promoted"
"""The resource name of the LLM that answers all conversations but a canary's."""
AWAY_SECONDS: Final = 120.0
"""How long a stack may be away, as while it is restarted."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Production:
    """The set. A subclass says what is in it, and runs what that needs; `failed` fails when a part of that ends by itself.

    Args:
        store: a connected store.
        resources_id: of the set.
        owner: the run's id.
    """

    def __init__(self, store: Store, *, resources_id: str, owner: str) -> None:
        self._store, self._resources_id, self._owner = store, resources_id, owner
        self._published = False
        self._canary = ""
        """The name of the published canary, also of one that this run published before it was killed."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.version = ""
        """Of the published set."""

    # --- of a subclass

    canary_stays: ClassVar[bool]
    """Whether a published canary answers while the command does not run."""
    limits_canary: ClassVar[bool]
    """Whether a canary takes no more conversations than it may although nobody looks."""

    def _resources(self, canary: str, share: float) -> NamedResources:
        """Return what is in the set: the promoted, and under its name a canary, if there is one."""
        raise NotImplementedError

    async def begin(self, promoted: Path, promotions: int) -> None:
        """Serve what is promoted, after so many promotions."""
        raise NotImplementedError

    async def start_canary(self, made: Path) -> None:
        """Make ready to publish a canary of what a cycle has made."""
        raise NotImplementedError

    async def promote(self, made: Path) -> None:
        """Let what a cycle has made answer everybody; the same again changes nothing."""
        raise NotImplementedError

    async def canary_answers(self) -> bool:
        """Whether the canary can answer."""
        return True

    async def settle(self) -> None:
        """Wait until what was replaced has ended."""

    async def withdraw(self) -> None:
        """Let what is promoted answer everybody."""
        await self.publish()

    async def close(self) -> None:
        """End what runs."""
        self.failed.cancel()
        if self.failed.done() and not self.failed.cancelled():
            self.failed.exception()

    # --- the set

    async def own(self, *, force: bool) -> None:
        """Raise UsageError if the set is another's; with `force` it is taken over."""
        now = await self._store.resources(self._resources_id)
        self.version = "" if now is None else str(now.version)
        if now is None or force or _owner_of(now) == self._owner:
            self._canary = next(iter(shares_in(now.resources if now is not None else {})), "")
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

    async def publish(self, canary: str = "", share: float = 0.0) -> None:
        """Say who answers whom: the canary under this name its share of the conversations, the promoted all others."""
        waits = f"the set {self._resources_id} waits for the stack: %s"
        await patiently(lambda: self._publish(canary, share), lambda error: _log.warning(waits, error))

    async def _publish(self, canary: str = "", share: float = 0.0) -> None:
        now = await self.current()
        wanted = {**self._resources(canary, share), OWNER: PromptTemplate(template=self._owner, engine="jinja")}
        if now is None or now.resources != wanted:
            now = await self._store.publish(wanted, resources_id=self._resources_id, aside=True)
        self.version, self._canary = str(now.version), canary
        self._published = True


async def patiently(
    work: Callable[[], Awaitable[T]],
    on_away: Callable[[UnavailableError], object],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Await `work()`, and begin it again where the stack was away; raise the error where it stays away for AWAY_SECONDS."""
    tries: Tries | None = None
    while True:
        began = clock()
        try:
            return await work()
        except UnavailableError as error:
            if tries is None or clock() - began > AWAY_SECONDS:  # the stack was back meanwhile
                tries = Tries(QUICK, seconds=AWAY_SECONDS, clock=clock)
                on_away(error)
            if (pause := tries.pause()) is None:
                raise
        await asyncio.sleep(pause)


def _owner_of(update: ResourcesUpdate) -> str:
    owner = update.resources.get(OWNER)
    return owner.template if isinstance(owner, PromptTemplate) else ""
