"""`python -m agl_otel.stack.embedded [SERVICE …]`: the supervisor of a stack that belongs to one store object.

It says where the stack is in one line of JSON and ends when its standard input ends; --discard removes the data directory then. Started by
store/embedded.py, which gives it its settings, not by people.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys

from agl_otel.errors import AglError, InUseError
from agl_otel.service.private import keep_private
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import Stack, read_stack_file


async def run(settings: Settings, services: list[str], *, discard: bool) -> None:
    """Run the stack until standard input ends; where one runs on the data directory already, name that and return."""
    data_dir = settings.data_dir
    stack = Stack(settings, only=services)
    try:
        await stack.start()
    except InUseError:
        await stack.stop()
        if (running := read_stack_file(data_dir)).get("queue"):
            return _say({"address": running["queue"]["address"]})
        raise
    try:
        _say({"address": stack.address})
        await asyncio.wait([asyncio.ensure_future(_end_of_input()), stack.failed], return_when=asyncio.FIRST_COMPLETED)
    finally:
        if discard:
            await stack.kill()
        await stack.stop()
        if discard:
            shutil.rmtree(data_dir, ignore_errors=True)


async def _end_of_input() -> None:
    """Return when the store's process closes our standard input, or is gone, or we are told to end."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(0, lambda: os.read(0, 4096) or ended.set())
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    loop.remove_reader(0)


def _say(answer: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """The command line."""
    keep_private()
    parser = argparse.ArgumentParser()
    parser.add_argument("services", nargs="*")
    parser.add_argument("--discard", action="store_true")
    given = parser.parse_args()
    try:
        asyncio.run(run(Settings.load(), given.services, discard=given.discard))
    except AglError as error:
        _say({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
