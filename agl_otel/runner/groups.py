"""Ends agents' process groups: one group, until all its processes are gone, or all at once when the runner must exit immediately."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final, Protocol

from agl_otel.service.processes import environment_of, signal_group, stats
from agl_otel.service.retry import Backoff
from agl_otel_hook import conventions

_POLL: Final = Backoff(0.005, 0.2, jitter=0.0)  # the kernel sends no notification when a group becomes empty
_KILL_SECONDS: Final = 1.0
_live: set[int] = set()


def register(group: int) -> None:
    """Add the group to those that `kill_all` ends."""
    _live.add(group)


class Leader(Protocol):
    """The process that leads a group."""

    @property
    def pid(self) -> int:
        """The process id, which is also the group's id."""
        ...

    async def wait(self) -> int:
        """Wait until it has exited; return the exit status."""
        ...


async def end_group(process: Leader, grace_seconds: float) -> None:
    """End the process group that `process` leads: SIGTERM, after `grace_seconds` SIGKILL. Returns when all its processes are gone."""
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not signal_group(process.pid, number) or await _wait_until_gone(process.pid, grace_seconds):
                break
        await process.wait()
    finally:
        _live.discard(process.pid)


async def end_detached(find: Callable[[], Collection[int]], grace_seconds: float) -> None:
    """End the processes that `find` returns: SIGTERM, after `grace_seconds` SIGKILL.

    They have left their process group. `find` is called until it returns none, because they may fork.
    """
    for number, seconds in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, _KILL_SECONDS)):
        deadline, polls = time.monotonic() + seconds, 0
        signalled: set[int] = set()
        while pids := await asyncio.to_thread(find):
            for pid in pids if number == signal.SIGKILL else {*pids} - signalled:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            signalled.update(pids)
            if time.monotonic() > deadline:
                break
            polls += 1
            await asyncio.sleep(_POLL.seconds(polls))
        if not pids:
            return


def pids_with_attempt(attempt_id: str) -> set[int]:
    """Find the running processes, other than this one, whose environment names the attempt."""
    variable = f"{conventions.ENV_ATTEMPT_ID}={attempt_id}".encode()
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")} - {os.getpid()}
    return {pid for pid in pids if variable in environment_of(pid)}


def kill_all() -> None:
    """Send SIGKILL to every registered group."""
    for group in list(_live):
        signal_group(group, signal.SIGKILL)


def is_alive(group: int) -> bool:
    """Return whether a process of the group runs. Zombies do not count: without a reaper for orphans they never disappear."""
    if not signal_group(group, 0):
        return False
    return any(member_of == group and state not in "ZX" for _, state, _, member_of in stats())


async def _wait_until_gone(group: int, seconds: float) -> bool:
    deadline, polls = time.monotonic() + seconds, 0
    while is_alive(group):
        if time.monotonic() > deadline:
            return False
        polls += 1
        await asyncio.sleep(_POLL.seconds(polls))
    return True
