"""The main function of every service: settings, logs, the line that it is ready, graceful stop on SIGTERM or SIGINT, exit code.

A service is an async context manager: entering it starts it and yields `Serving`, leaving it stops it gracefully. It does not deal with
signals or exit codes, so it starts in a test as in a process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, NoReturn

from agl_otel.errors import AglError
from agl_otel.service import logs
from agl_otel.service.interpreter import tune_for_latency
from agl_otel.service.private import keep_private
from agl_otel.settings import Settings
from agl_otel.text import printable_lines

SAME_SECONDS: Final = 0.3  # SIGTERMs within it count as one: the kernel sends one for each thread of a killed parent
STOP_SECONDS: Final = 60.0  # every part of a stop has a shorter limit, so after this the service is stuck
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Serving(NamedTuple):
    """A service that has started."""

    line: str
    """The line to log, e.g. `the queue serves on 127.0.0.1:4747`."""
    ended: Awaitable[object] | None = None
    """Completes when the service is finished, or raises when it fails; None: only a signal ends it."""


Service = AbstractAsyncContextManager[Serving]


def run_service(name: str, service: Callable[[Settings], Service], *, cancel_start: bool = False) -> int:
    """Run a service with the settings of the environment until SIGTERM or SIGINT; return the exit code.

    It is 0 after a graceful stop, and 1 with a message on stderr if the service raised an AglError, mostly because it could not start.
    For `cancel_start` see `until_stopped`.
    """
    keep_private()
    logger = logging.getLogger(f"agl_otel.{name}")

    def ready(line: str) -> None:
        tune_for_latency()
        logger.info("%s", line)

    async def main(settings: Settings) -> None:
        await until_stopped(service(settings), ready, cancel_start=cancel_start)

    try:
        settings = Settings.load()
        logs.configure(settings.log_level, settings.log_format, force=True)
        asyncio.run(main(settings))
    except AglError as error:
        print(f"agl-otel {name}: {printable_lines(str(error))}", file=sys.stderr)  # noqa: T201 - for the person who started it
        return 1
    return 0


async def until_stopped(
    service: Service, ready: Callable[[str], None], *, cancel_start: bool = False, stop_seconds: float | None = STOP_SECONDS
) -> None:
    """Start a service, call `ready` with its line, and stop it on SIGTERM, SIGINT or its own end. Raises what the service raises.

    A signal during the start takes effect once the service has started, or with `cancel_start` cancels the start. If the service has not
    stopped `stop_seconds` after the signal, the process exits with code 1.
    """
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    started = False

    async def serve() -> None:
        nonlocal started
        async with service as serving:
            started = True
            ready(serving.line)
            await _first_of(stopped.wait(), *([serving.ended] if serving.ended is not None else []))

    task = asyncio.create_task(serve(), name="service")

    def stop() -> None:
        if stopped.is_set():
            return
        stopped.set()
        if stop_seconds is not None:
            loop.call_later(stop_seconds, _end_at_once, stop_seconds)
        if cancel_start and not started:
            task.cancel()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not stopped.is_set():
            raise


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Wait for the first to finish; raise its error."""
    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()


def _end_at_once(seconds: float) -> NoReturn:
    logging.getLogger(__name__).error("the service did not stop within %.0f s of the signal: its process ends now", seconds)
    os._exit(1)


def on_stop_signals(
    first: Callable[[signal.Signals], None], again: Callable[[signal.Signals], None], *, same_seconds: float = SAME_SECONDS
) -> None:
    """Call `first` on the first SIGTERM or SIGINT and `again` on each later one, from the running loop: for commands.

    A SIGTERM within `same_seconds` of the first signal is ignored; a second Ctrl+C never is.
    """
    loop = asyncio.get_running_loop()
    began: float | None = None

    def received(number: signal.Signals) -> None:
        nonlocal began
        if began is None:
            began = loop.time()
            first(number)
        elif number == signal.SIGINT or loop.time() - began > same_seconds:
            again(number)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, received, number)
