"""`python -m agl_otel.queue`: the queue as a service. SIGTERM and SIGINT stop it gracefully, with exit code 0."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from agl_otel.net.tls import Tls
from agl_otel.queue.server import QueueServer, open_engine
from agl_otel.service.main import Serving, run_service
from agl_otel.settings import Settings
from agl_otel.telemetry.reporting import served


@asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[Serving]:
    """Run the queue. Raises InUseError, SettingsError, ConflictError before it takes calls."""
    tls = Tls.load(settings)
    engine = open_engine(settings.queue_db)
    server = QueueServer(engine, token=settings.token.get_secret_value())
    try:
        address = await server.start(settings.host, settings.queue_port, tls)
        async with served(server.meters, settings, "queue", settings.queue_metrics_port, "AGL_QUEUE_METRICS_PORT"):
            yield Serving(f"the queue serves on {address} with {engine.where}")
    finally:
        await server.stop()


def main() -> int:
    """Run the service; return the exit code."""
    return run_service("queue", serving)


if __name__ == "__main__":
    sys.exit(main())
