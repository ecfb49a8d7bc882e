"""Share a stack: what uses one data directory uses the stack that the first of them has started there, and it ends with the last."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agl_otel.errors import InUseError, SettingsError, UnavailableError
from agl_otel.service.lock import FileLock, holder
from agl_otel.service.private import access_problem
from agl_otel.service.processes import HEALTH_POLL_SECONDS
from agl_otel.settings import Settings
from agl_otel.stack.services import SERVICES
from agl_otel.stack.supervisor import LOCK_FILE, START_TIMEOUT_SECONDS, Stack, read_stack_file, running_address

if TYPE_CHECKING:
    from agl_otel.store import Store

LOG = logging.getLogger(__name__)
USERS_FILE: Final = "stack.users"
"""Locked, shared, by each process that uses a stack which another one runs on the data directory."""
WAITS: Final = "another command uses the stack on %s: this one waits for its end, and then stops the stack"
JOIN_SECONDS: Final = 10.0
GONE_SECONDS: Final = 8.0  # longer than the restart of a stack on its ports may take, and shorter than clients try (RETRY_SECONDS)
WATCH_SECONDS: Final = 0.5
CALLED: Final = ("collector", "proxy")
"""The services that commands call besides the queue, which every stack has."""


@contextlib.asynccontextmanager
async def stack_for(settings: Settings, *, only: Sequence[str] = ()) -> AsyncGenerator[tuple[str, asyncio.Future[None]]]:
    """Provide a stack for a command: the one of the settings, else the one running on the data directory, else one started there
    temporarily (`only` these services), on free ports, which ends when no command uses it any more.

    Yields the stack's address and a future that fails when the supervision of a stack started here fails, or when one that another
    command has started ends, as with a kill of that command. Raises what `using_stack` and Stack raise.
    """
    stack = Stack(settings.model_copy(update={port: 0 for service in SERVICES for port in service.ports}), only=only)
    with contextlib.ExitStack() as until_ended:
        async with start_or_join(stack, only=only) as address:
            if not address:
                try:
                    yield stack.address, stack.failed
                finally:
                    until_ended.enter_context(await last_user(stack.data_dir, on_wait=lambda: LOG.warning(WAITS, stack.data_dir)))
                return
            ended = asyncio.get_running_loop().create_future()
            watcher = asyncio.create_task(_watch_joined(settings, address, ended))
            try:
                yield address, ended
            finally:
                watcher.cancel()
                if not ended.cancel() and not ended.cancelled():
                    ended.exception()  # marks it as retrieved


@contextlib.asynccontextmanager
async def store_for(settings: Settings, *, only: Sequence[str] = ()) -> AsyncGenerator[tuple[Store, asyncio.Future[None]]]:
    """Provide a store over the stack of `stack_for`, and the future of that."""
    from agl_otel.store import Store  # imports numpy and aiohttp, which a command on the queue does not need

    async with (
        stack_for(settings, only=only) as (address, ended),
        await Store.connect(address, token=settings.token.get_secret_value()) as store,
    ):
        yield store, ended


@contextlib.asynccontextmanager
async def start_or_join(
    stack: Stack, *, only: Sequence[str] = (), start: Callable[[], Awaitable[None]] | None = None
) -> AsyncGenerator[str]:
    """Run `stack` during the block and yield "", or yield the address of the one that its settings name or that runs on its data directory.

    `start` is called to start it, instead of its own. Waits for one that another command is just starting or stopping. Raises what
    `using_stack` and Stack raise.
    """
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        async with using_stack(stack.settings, only=only) as address:
            if address:
                yield address
                return
        try:
            await (start or stack.start)()
            break
        except InUseError:
            if stack.claimed or time.monotonic() > deadline:
                await stack.stop()
                raise
            await asyncio.sleep(HEALTH_POLL_SECONDS)
        except BaseException:
            await stack.stop()
            raise
    try:
        yield ""
    finally:
        await stack.stop()


@contextlib.asynccontextmanager
async def using_stack(settings: Settings, *, only: Sequence[str] = ()) -> AsyncGenerator[str]:
    """Yield `running_address`; a stack that another command has started on the data directory does not end before the block does.

    Waits for the end of one that is about to end, and at most JOIN_SECONDS for the end of one that has too few services, such as that of a
    command that only reads. `only`: the services that are needed; all by default. Raises InUseError if it does not end.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    while address := running_address(settings):
        if settings.store:
            break
        try:
            user: AbstractContextManager[object] = FileLock.take(settings.data_dir / USERS_FILE, shared=True)
        except BlockingIOError:
            await asyncio.sleep(HEALTH_POLL_SECONDS)
            continue
        except OSError:  # a full disk, or a file system without locks
            user = contextlib.nullcontext()
        with user:
            running = read_stack_file(settings.data_dir)
            missing = [name for name in CALLED if name not in running and (not only or name in only)]
            if running_address(settings) == address and not missing:
                yield address
                return
        if time.monotonic() > deadline:
            raise InUseError(
                f"the stack on {settings.data_dir} has no {' and no '.join(missing)}: process {holder(settings.data_dir / LOCK_FILE)} "
                "started it for itself. Start this command again when that has ended, or first `agl-otel up`, which both can use"
            )
        await asyncio.sleep(HEALTH_POLL_SECONDS)
    yield address


async def _watch_joined(settings: Settings, address: str, ended: asyncio.Future[None]) -> None:
    """Set an UnavailableError in `ended` once the stack at `address`, which another command has started, is gone for GONE_SECONDS."""
    clock = asyncio.get_running_loop().time
    pid, seen = holder(settings.data_dir / LOCK_FILE), clock()
    while True:
        if running_address(settings) == address:
            seen = clock()
        elif clock() - seen >= GONE_SECONDS:  # never without a look: this process may have been held up for so long
            break
        await asyncio.sleep(WATCH_SECONDS)
    ended.set_exception(
        UnavailableError(
            f"the stack on {settings.data_dir} has ended: the command that had started it (process {pid}), with which this one shared it, "
            "was stopped or killed. What the stack had acknowledged is kept: start this command again, a training run with its --run-dir"
        )
    )


async def last_user(data_dir: Path, *, on_wait: Callable[[], object]) -> AbstractContextManager[object]:
    """Wait until no other process uses the stack that this one has started on `data_dir`; `on_wait` is called where some do.

    None begins to (`using_stack`) before what is returned is closed.
    """
    told = False
    while True:
        try:
            return FileLock.take(data_dir / USERS_FILE)
        except BlockingIOError:
            if not told:
                on_wait()
            told = True
            await asyncio.sleep(HEALTH_POLL_SECONDS)
        except OSError:  # a full disk, or a file system without locks
            return contextlib.nullcontext()


def must_have_data(settings: Settings) -> None:
    """Raise SettingsError if the settings name no stack, and their data directory holds no data or is closed to this user."""
    if settings.store:
        return
    if why := access_problem(settings.data_dir):
        raise SettingsError(why)
    if not (settings.data_dir / "VERSION").exists():
        raise SettingsError(
            f"there is no stack and no data in {settings.data_dir}: give --data-dir or --store, or start one with `agl-otel up`"
        )


@contextlib.asynccontextmanager
async def open_store(settings: Settings) -> AsyncGenerator[Store]:
    """Provide a store for commands that only read: like store_for, with queue and collector only.

    Raises SettingsError if there is neither a stack nor data.
    """
    must_have_data(settings)
    async with store_for(settings, only=("queue", "collector")) as (store, _):
        yield store
