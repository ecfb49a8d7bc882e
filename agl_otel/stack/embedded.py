"""`python -m agl_otel.stack.embedded [SERVICE …]`: the supervisor of a store object's private stack.

It prints the stack's address as one line of JSON when the queue runs, and again for each line of its standard input when all services do;
with --discard, the first such line starts the others. It ends with its input, and with --discard then removes the data directory. While
others use the stack it goes on instead, and prints {"shared": true}.
store/embedded.py starts it and passes its settings.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial

from agl_otel.errors import AglError
from agl_otel.service.main import Serving, until_stopped
from agl_otel.service.private import keep_private
from agl_otel.settings import Settings
from agl_otel.stack.sharing import last_user, start_or_join
from agl_otel.stack.supervisor import Stack
from agl_otel.store.embedded import SHARED_LINE


class _Input:
    """Standard input of the running loop's process: its lines are requests, without content."""

    def __init__(self) -> None:
        self.requested, self.over = asyncio.Event(), asyncio.Event()
        asyncio.get_running_loop().add_reader(0, self._read)

    def _read(self) -> None:
        if os.read(0, 4096):
            self.requested.set()
        else:
            asyncio.get_running_loop().remove_reader(0)
            self.over.set()


@asynccontextmanager
async def serving(stack: Stack, write_line: Callable[[str], None], *, discard: bool) -> AsyncGenerator[Serving]:
    """Run the stack until standard input ends, and no other command or store uses it any more.

    If one already runs on the data directory, use that one until standard input ends.
    """
    only = [service.name for service in stack.services]
    given = _Input()
    with contextlib.ExitStack() as until_ended:
        async with start_or_join(stack, only=only, start=stack.start_early) as joined:
            address = json.dumps({"address": joined or stack.address})

            async def start_others() -> str:
                try:
                    if not joined:
                        await stack.start_others()
                except (AglError, OSError) as error:  # the queue runs on
                    return json.dumps({"error": str(error)})
                return address

            async def answer() -> None:
                if discard:
                    await given.requested.wait()
                line = await start_others()
                while True:
                    await given.requested.wait()
                    given.requested.clear()
                    write_line(line)

            async def unused() -> None:
                await given.over.wait()
                if not joined and not discard:
                    until_ended.enter_context(await last_user(stack.data_dir, on_wait=_release_owner))

            tasks = [asyncio.create_task(answer()), asyncio.create_task(unused())]
            try:
                ends = tasks if joined else [*tasks, stack.failed]
                yield Serving(address, asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if discard and not joined:
                    await stack.kill()
                    await stack.stop()
                    shutil.rmtree(stack.data_dir, ignore_errors=True)


def _release_owner() -> None:
    """Tell the store's process, which waits for the end of this one, that the stack goes on for others."""
    with contextlib.suppress(OSError):  # it was killed
        os.write(1, SHARED_LINE)


def main() -> int:
    """Run the command line; return the exit code. An error is also one line of JSON."""
    keep_private()
    parser = argparse.ArgumentParser()
    parser.add_argument("services", nargs="*")
    parser.add_argument("--discard", action="store_true")
    given = parser.parse_args()
    write_line = partial(print, flush=True)

    async def run(stack: Stack) -> None:
        service = serving(stack, write_line, discard=given.discard)
        await until_stopped(service, write_line, cancel_start=True, stop_seconds=None)  # the stack bounds the stop of each service

    try:
        stack = Stack(Settings.load(), only=given.services)
        stack.prefork(early=given.discard)  # the others start when they are needed, if ever
        asyncio.run(run(stack))
    except AglError as error:
        write_line(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
