"""`python -m agl_otel.collector`: run the collector as a service. SIGTERM and SIGINT drain it, with exit code 0."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agl_otel.collector.service import Collector
from agl_otel.service.main import Serving, run_service
from agl_otel.settings import Settings


@asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[Serving]:
    """Run the collector within the context. Raises AglError if it cannot start, and the error that ends its writer."""
    collector = Collector(settings)
    await collector.start()
    try:
        yield Serving(f"the collector serves on {collector.addresses}", collector.failed())
    finally:
        await collector.stop()


def main() -> int:
    """Run the service; return the exit code."""
    return run_service("collector", serving)


if __name__ == "__main__":
    sys.exit(main())
