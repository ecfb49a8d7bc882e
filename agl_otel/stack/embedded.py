"""`python -m agl_otel.stack.embedded [SERVICE …]`: the supervisor of a store object's private stack.

It prints the stack's address as one line of JSON and ends with its standard input; with --discard it then removes the data directory.
While others use the stack it goes on instead, and prints {"shared": true}.
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
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from agl_otel.errors import AglError
from agl_otel.service.main import Serving, until_stopped
from agl_otel.service.private import keep_private
from agl_otel.settings import Settings
from agl_otel.stack.sharing import last_user, start_or_join
from agl_otel.stack.supervisor import Stack

SHARED_LINE: Final = b'{"shared": true}\n'


@asynccontextmanager
async def serving(stack: Stack, *, discard: bool) -> AsyncGenerator[Serving]:
    """Run the stack until standard input ends, and no other command or store uses it any more.

    If one already runs on the data directory, use that one until standard input ends.
    """
    only = [service.name for service in stack.services]
    with contextlib.ExitStack() as until_ended:
        async with start_or_join(stack, only=only) as address:
            if address:
                yield Serving(json.dumps({"address": address}), _end_of_input())
                return

            async def unused() -> None:
                await _end_of_input()
                if not discard:
                    until_ended.enter_context(await last_user(stack.data_dir, on_wait=_release_owner))

            try:
                ended = asyncio.wait([asyncio.ensure_future(unused()), stack.failed], return_when=asyncio.FIRST_COMPLETED)
                yield Serving(json.dumps({"address": stack.address}), ended)
            finally:
                if discard:
                    await stack.kill()
                    await stack.stop()
                    shutil.rmtree(stack.data_dir, ignore_errors=True)


def _release_owner() -> None:
    """Tell the store's process, which waits for the end of this one, that the stack goes on for others."""
    with contextlib.suppress(OSError):  # it was killed
        os.write(1, SHARED_LINE)


async def _end_of_input() -> None:
    """Wait until the store's process closes this process's standard input or ends."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(0, lambda: os.read(0, 4096) or ended.set())
    await ended.wait()
    loop.remove_reader(0)


def main() -> int:
    """Run the command line; return the exit code. An error is also one line of JSON."""
    keep_private()
    parser = argparse.ArgumentParser()
    parser.add_argument("services", nargs="*")
    parser.add_argument("--discard", action="store_true")
    given = parser.parse_args()
    write_line = partial(print, flush=True)

    async def run(stack: Stack) -> None:
        service = serving(stack, discard=given.discard)
        await until_stopped(service, write_line, cancel_start=True, stop_seconds=None)  # the stack bounds the stop of each service

    try:
        stack = Stack(Settings.load(), only=given.services)
        stack.prefork()
        asyncio.run(run(stack))
    except AglError as error:
        write_line(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
