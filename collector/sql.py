"""`python -m agl_otel.collector.sql`: the SQL endpoint over a ClickHouse server, for stacks whose collector is not ours and has none.

It creates or updates the schema, holds the server's password, requires the stack's token, and allows only reads, like our collector's
endpoint.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from aiohttp import web

from agl_otel.collector.sqlhttp import SqlEndpoint
from agl_otel.errors import InUseError
from agl_otel.net.auth import own_names
from agl_otel.net.http_server import listen, make_runner, require_certificate
from agl_otel.net.tls import Tls
from agl_otel.service.main import Serving, run_service
from agl_otel.settings import Settings
from agl_otel.traces.address import ServerAddress
from agl_otel.traces.opened import open_store


@asynccontextmanager
async def serving(settings: Settings) -> AsyncGenerator[Serving]:
    """Serve the endpoint within the block. Raises SettingsError, ConflictError, InUseError if it cannot start."""
    tls = Tls.load(settings)
    engine = await asyncio.to_thread(open_store, settings.clickhouse_db, retention_days=settings.retention_days)
    ping = ServerAddress.parse(settings.clickhouse_db).ping
    endpoint = SqlEndpoint(
        engine, token=settings.token.get_secret_value(), shared=True, ping=ping, in_flight_bytes=settings.max_in_flight_bytes
    )
    app = endpoint.app(own_names(settings))
    app.router.add_get("/health", _health)
    if tls is not None and tls.client_authority is not None:
        app.middlewares.append(require_certificate({"/ping", "/health"}))
    runner = make_runner(app, handle_signals=False, max_line_size=1 << 20, max_field_size=1 << 16)
    try:
        await runner.setup()
        try:
            await listen(runner, settings.host, settings.clickhouse_port, tls.context if tls else None)
        except OSError as error:
            raise InUseError.of_port(settings.host, settings.clickhouse_port, error, "AGL_CLICKHOUSE_PORT") from None
        yield Serving(f"the SQL endpoint serves on {settings.announced_host}:{settings.clickhouse_port}")
    finally:
        await runner.cleanup()
        endpoint.close()
        engine.close()


async def _health(_: web.Request) -> web.Response:
    return web.json_response({"status": "ok", "service": "sql"})


def main() -> int:
    """Run the service; return the exit code."""
    return run_service("sql", serving)


if __name__ == "__main__":
    sys.exit(main())
