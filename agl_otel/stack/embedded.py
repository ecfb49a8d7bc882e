"""`python -m agl_otel.stack.embedded [SERVICE …]`: the supervisor of a store object's private stack.

It prints the stack's address as one line of JSON and ends with its standard input; with --discard it then removes the data directory.
store/embedded.py starts it and passes its settings.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from agl_otel.errors import AglError, InUseError
from agl_otel.service.main import Serving, until_stopped
from agl_otel.service.private import keep_private
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack, read_stack_file


@asynccontextmanager
async def serving(stack: Stack, *, discard: bool) -> AsyncGenerator[Serving]:
    """Run the stack until standard input ends. If one already runs on the data directory, yield its address and end at once."""
    try:
        await stack.start()
    except BaseException as error:
        await stack.stop()
        running = read_stack_file(stack.data_dir).get("queue") if isinstance(error, InUseError) else None
        if running is None:
            raise
        yield Serving(json.dumps({"address": running["address"]}), asyncio.sleep(0))
        return
    try:
        ended = asyncio.wait([asyncio.ensure_future(_end_of_input()), stack.failed], return_when=asyncio.FIRST_COMPLETED)
        yield Serving(json.dumps({"address": stack.address}), ended)
    finally:
        if discard:
            await stack.kill()
        await stack.stop()
        if discard:
            shutil.rmtree(stack.data_dir, ignore_errors=True)


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
