"""`python -m agl_otel.queue`: the queue as a service. SIGTERM and SIGINT stop it in order, with exit code 0."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from agl_otel.errors import AglError
from agl_otel.net.tls import Tls
from agl_otel.queue.server import QueueServer, open_engine
from agl_otel.service import logs as logformat
from agl_otel.service.private import keep_private
from agl_otel.settings import Settings
from agl_otel.telemetry.reporting import served

SWITCH_INTERVAL_SECONDS = 0.0005  # the writer thread hands the interpreter over at every statement; the default 5 ms would make it wait


async def serve(settings: Settings) -> None:
    """Serve until a signal comes. Raises InUseError, SettingsError, ConflictError before the first call is taken."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tls = Tls.load(settings)
    engine = open_engine(settings.queue_db)
    server = QueueServer(engine, token=settings.token.get_secret_value())
    try:
        address = await server.start(settings.host, settings.queue_port, tls)
        logging.getLogger("agl_otel.queue").info("the queue serves on %s with %s", address, engine.where)
        async with served(server.meters, settings, "queue", settings.queue_metrics_port, "AGL_QUEUE_METRICS_PORT"):
            await stop.wait()
    finally:
        await server.stop()


def main() -> int:
    """Run the service with the settings of the environment; the exit code is 0, or 1 with a message on stderr."""
    keep_private()
    try:
        settings = Settings.load()
        logformat.configure(settings.log_level, settings.log_format)
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        asyncio.run(serve(settings))
    except AglError as error:
        print(f"agl-otel queue: {error}", file=sys.stderr)  # noqa: T201 - a message for the person who started it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
