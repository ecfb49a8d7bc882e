"""`python -m agl_otel.maintain`: run the maintenance as a service."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator

from agl_otel.maintain.maintainer import INTERVAL_SECONDS, maintainer
from agl_otel.service.main import Serving, run_service
from agl_otel.settings import Settings


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[Serving]:
    """Run a maintainer as a service."""
    async with maintainer(settings) as made:
        running = asyncio.ensure_future(made.run(INTERVAL_SECONDS))
        try:
            yield Serving(f"maintenance runs every {INTERVAL_SECONDS:.0f} s", running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def main() -> int:
    """Run the service; return the exit code."""
    return run_service("maintain", serving)


if __name__ == "__main__":
    sys.exit(main())
