"""`python -m agl_otel.collector.sql`: the SQL endpoint over a ClickHouse server, where the collector is not ours and has none.

It brings the schema up, keeps the server's password, asks for the stack's token, and lets only reads through, as the collector's does.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from aiohttp import web

from agl_otel.collector.sqlhttp import SqlEndpoint
from agl_otel.errors import AglError, InUseError
from agl_otel.net.http_server import listen, make_runner, own_names, require_certificate
from agl_otel.net.tls import Tls
from agl_otel.service import logs as logformat
from agl_otel.service.private import keep_private
from agl_otel.settings import Settings
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.opened import open_store


async def serve(settings: Settings) -> None:
    """Serve until a signal comes. Raises SettingsError, ConflictError, InUseError where it cannot start."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    tls = Tls.load(settings)
    engine = await asyncio.to_thread(open_store, settings.clickhouse_db, retention_days=settings.retention_days)
    ping = ServerAddress.parse(settings.clickhouse_db).ping
    endpoint = SqlEndpoint(engine, token=settings.token.get_secret_value(), shared=True, ping=ping)
    app = endpoint.app(own_names(settings))
    app.router.add_get("/health", _health)
    if tls is not None and tls.client_authority is not None:
        app.middlewares.append(require_certificate({"/ping", "/health"}))
    runner = make_runner(app, handle_signals=False, max_line_size=1 << 20, max_field_size=1 << 16)
    try:
        await runner.setup()
        await listen(runner, settings.host, settings.clickhouse_port, tls.context if tls else None)
        await stop.wait()
    except OSError as error:
        raise InUseError.of_port(settings.host, settings.clickhouse_port, error, "AGL_CLICKHOUSE_PORT") from None
    finally:
        await runner.cleanup()
        endpoint.close()
        engine.close()


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "service": "sql"})


def main() -> int:
    """Run the service with the settings of the environment; the exit code is 0, or 1 with one line on stderr."""
    keep_private()
    try:
        settings = Settings.load()
        logformat.configure(settings.log_level, settings.log_format, force=True)
        asyncio.run(serve(settings))
    except AglError as error:
        logging.getLogger("agl_otel.collector").error("agl-otel sql: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
