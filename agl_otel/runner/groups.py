"""Process groups of agents: ending one for sure, and all of them at once when the runner itself is told to go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol

from agl_otel.service.processes import environment_of, signal_group
from agl_otel.service.retry import Backoff
from agl_otel_hook import conventions

_POLL: Final = Backoff(0.005, 0.2, jitter=0.0)  # the kernel does not notify of a group that is empty
_KILL_SECONDS: Final = 1.0
_live: set[int] = set()


def register(group: int) -> None:
    """Have `kill_all` know the group."""
    _live.add(group)


class Leader(Protocol):
    """The process that leads a group."""

    @property
    def pid(self) -> int:
        """Its id, which is the group's."""
        ...

    async def wait(self) -> int:
        """Wait for its end."""
        ...


async def end_group(process: Leader, grace_seconds: float) -> None:
    """End what is left of the process group that `process` leads: SIGTERM, after `grace_seconds` SIGKILL. Returns when all are gone."""
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not signal_group(process.pid, number) or await _gone(process.pid, grace_seconds):
                break
        await process.wait()
    finally:
        _live.discard(process.pid)


async def end_leftovers(leftovers: Callable[[], Collection[int]], grace_seconds: float) -> None:
    """End processes that left their group: SIGTERM, after `grace_seconds` SIGKILL. They are looked for again, for they may fork."""
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        deadline, looks = time.monotonic() + seconds, 0
        told: set[int] = set()
        while pids := await asyncio.to_thread(leftovers):
            for pid in pids if number == signal.SIGKILL else {*pids} - told:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            told.update(pids)
            if time.monotonic() > deadline:
                break
            looks += 1
            await asyncio.sleep(_POLL.seconds(looks))
        if not pids:
            return


def named_in_environments(attempt_id: str) -> set[int]:
    """Processes that name the attempt in their environment and have not ended."""
    wanted = f"{conventions.ENV_ATTEMPT_ID}={attempt_id}".encode()
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return {pid for pid in pids if wanted in environment_of(pid)}


def kill_all() -> None:
    """End every registered group at once."""
    for group in list(_live):
        signal_group(group, signal.SIGKILL)


def is_alive(group: int) -> bool:
    """Whether a process of the group still runs. Zombies do not count: where nobody reaps orphans they stay for ever."""
    if not signal_group(group, 0):
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, member_of = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if member_of == str(group) and state not in "ZX":
                return True
    return False


async def _gone(group: int, seconds: float) -> bool:
    deadline, looks = time.monotonic() + seconds, 0
    while is_alive(group):
        if time.monotonic() > deadline:
            return False
        looks += 1
        await asyncio.sleep(_POLL.seconds(looks))
    return True
