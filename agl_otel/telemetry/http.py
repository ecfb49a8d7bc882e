"""Metrics over HTTP: request counts for services with an HTTP port, and a separate metrics port for those without."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from time import perf_counter
from typing import Final

from aiohttp import web

from agl_otel.errors import InUseError
from agl_otel.net.auth import METRICS, BrowserAccess, own_names
from agl_otel.net.http_server import Handler, browser_access, listen, make_runner, require_certificate
from agl_otel.net.tls import Tls
from agl_otel.settings import Settings
from agl_otel.telemetry.meters import Meters

DISCONNECTED: Final = "499"
"""The `status` of a request whose client disconnected; as in 0.3."""
CRASHED: Final = "520"
"""The `status` of a request whose handler failed."""
OPEN_PATHS: Final = frozenset({"/health"})


class Requests:
    """Counts and times requests by route, method and status."""

    def __init__(self, meters: Meters) -> None:
        self._count = meters.counter("agl.http.total", "Requests over HTTP.", "path", "method", "status")
        self._took = meters.durations("agl.http.latency", "Seconds until their answer.", "path", "method", "status")

    def ended(self, began: float, path: str, method: str, status: str) -> None:
        """Count a request of a route (`path`) that began at `perf_counter()` time `began`."""
        self._count(path, method, status)
        self._took(perf_counter() - began, path, method, status)

    @web.middleware
    async def counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: count the requests of an application."""
        began = perf_counter()
        status = CRASHED
        try:
            answer = await handler(request)
            status = str(answer.status)
        except web.HTTPException as error:
            status = str(error.status)
            raise
        except asyncio.CancelledError:
            status = DISCONNECTED
            raise
        else:
            return answer
        finally:
            resource = request.match_info.route.resource
            if resource is not None:
                self.ended(began, resource.canonical, request.method, status)
            else:
                self.ended(began, "(none)", "", status)


def page(meters: Meters) -> web.Response:
    """Return the response to GET /metrics."""
    from agl_otel.telemetry.exposition import CONTENT_TYPE

    return web.Response(body=meters.text().encode(), headers={"Content-Type": CONTENT_TYPE})


@contextlib.asynccontextmanager
async def metrics_port(meters: Meters, settings: Settings, port: int, setting: str) -> AsyncGenerator[None]:
    """Serve GET /metrics (behind the token, if there is one) and GET /health on `port` of the settings' host.

    Raises InUseError if the port is taken.
    """
    tls, token = Tls.load(settings), settings.token.get_secret_value()

    async def metrics(request: web.Request) -> web.Response:
        if (why := METRICS.refusal(token, request.headers)) is not None:
            return web.Response(status=401, text=why + "\n", headers={"WWW-Authenticate": "Bearer"})
        return page(meters)

    async def health(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application(middlewares=[browser_access(BrowserAccess(own_names(settings)))])
    if tls is not None and tls.client_authority is not None:
        app.middlewares.append(require_certificate(OPEN_PATHS))
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/health", health)
    runner = make_runner(app)
    await runner.setup()
    try:
        try:
            await listen(runner, settings.host, port, tls.context if tls else None)
        except OSError as error:
            raise InUseError.of_port(settings.host, port, error, setting) from None
        yield
    finally:
        await runner.cleanup()
