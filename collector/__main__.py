"""`python -m agl_otel.collector`: the collector as a service. SIGTERM and SIGINT drain it, with exit code 0."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Coroutine

from agl_otel.collector.service import Collector
from agl_otel.errors import AglError
from agl_otel.service import logs as logformat
from agl_otel.service.interpreter import answer_first
from agl_otel.service.private import keep_private
from agl_otel.settings import Settings


async def serve(settings: Settings) -> None:
    """Serve until a signal comes. Raises AglError where it cannot start."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    collector = Collector(settings)
    await collector.start()
    logging.getLogger("agl_otel.collector").info("the collector serves on %s", collector.addresses)
    try:
        await first_of(stop.wait(), collector.failed())
    finally:
        await collector.stop()


async def first_of(*coroutines: Coroutine[None, None, object]) -> None:
    """Wait for the first to end; raises what it raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    for task in done:
        task.result()


def main() -> int:
    """Run the service with the settings of the environment; the exit code is 0, or 1 with one line on stderr."""
    keep_private()
    try:
        settings = Settings.load()
        logformat.configure(settings.log_level, settings.log_format, force=True)
        answer_first()
        asyncio.run(serve(settings))
    except AglError as error:
        print(f"agl-otel collector: {error}", file=sys.stderr)  # noqa: T201 - a message for the person who started it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
