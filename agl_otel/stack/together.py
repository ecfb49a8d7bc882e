"""`python -m agl_otel.stack.together MODULE…`: services in one process, each as its module runs it alone.

The others call the first one, and the process ends when that ends. Each of the others that fails after its start is started again by
itself, after pauses that double; it is logged, and reported to the queue.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple

from agl_otel.errors import AglError
from agl_otel.service.forkserver import program
from agl_otel.service.main import Service, Serving, run_service
from agl_otel.settings import Settings
from agl_otel.stack.supervisor import START_TIMEOUT_SECONDS, STEADY_SECONDS, report_down, restart_pause
from agl_otel.text import error_text

_logger = logging.getLogger(__name__)


class _Part(NamedTuple):
    """A service besides the first."""

    name: str
    serving: Callable[[Settings], Service]

    async def keep(self, settings: Settings, started: asyncio.Future[str]) -> None:
        """Run it until cancelled; `started` gets its line, or the error of its first start."""
        failures = 0
        while True:
            began, unexpected = time.monotonic(), None
            try:
                async with self.serving(settings) as part:
                    if started.done():
                        _logger.warning("%s is up again", self.name)
                        await report_down(settings, self.name)
                    else:
                        started.set_result(part.line)
                    await (part.ended or asyncio.Event().wait())
                why = "has ended"
            except Exception as error:  # noqa: BLE001 - whatever it is, the services beside it go on
                if not started.done():
                    started.set_exception(error)
                    return
                why = f"has failed ({error_text(error)})"
                unexpected = None if isinstance(error, AglError) else error
            failures = failures + 1 if time.monotonic() - began < STEADY_SECONDS else 1
            pause = restart_pause(failures)
            why += f"; it is started again {f'in {pause:.0f} s' if pause else 'now'}, the services in its process keep running"
            _logger.warning("%s %s", self.name, why, exc_info=unexpected)
            await report_down(settings, self.name, why, seconds=pause + START_TIMEOUT_SECONDS)
            await asyncio.sleep(pause)


@asynccontextmanager
async def serving(modules: Sequence[str], settings: Settings) -> AsyncGenerator[Serving]:
    """Run the services of these modules. Raises what their starts raise."""
    first, *others = modules
    async with program(first).serving(settings) as held:
        loop = asyncio.get_running_loop()
        started: list[asyncio.Future[str]] = [loop.create_future() for _ in others]
        parts = [_Part(module.rpartition(".")[2], program(module).serving) for module in others]
        kept = [asyncio.create_task(part.keep(settings, line), name=part.name) for part, line in zip(parts, started, strict=True)]
        try:
            lines = await asyncio.gather(*started)
            yield Serving("; ".join((held.line, *lines)), held.ended)
        finally:
            for each in (*kept, *started):
                each.cancel()
            await asyncio.gather(*kept, *started, return_exceptions=True)


def main() -> int:
    """Run the services of the modules on the command line; return the exit code."""
    modules = sys.argv[1:]
    return run_service(modules[0].rpartition(".")[2], partial(serving, modules))


if __name__ == "__main__":
    sys.exit(main())
