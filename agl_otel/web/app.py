"""The aiohttp application: routes to small handlers over one Store. No HTML and no SQL live here."""

from __future__ import annotations

import asyncio
import hmac
import signal
from collections.abc import Awaitable, Callable
from typing import cast, get_args

from aiohttp import web

from agl_otel.errors import AglError, InUseError, UsageError, http_status
from agl_otel.listen import listen, require_certificate
from agl_otel.queue.client import QueueClient
from agl_otel.settings import Settings
from agl_otel.store import DESCRIBE_PATH
from agl_otel.tls import Tls
from agl_otel.types import RolloutStatus

QUEUE = web.AppKey("queue", QueueClient)
TOKEN = web.AppKey("token", str)
OPEN_PATHS = frozenset({"/health"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def health(_: web.Request) -> web.Response:
    """GET /health."""
    return web.json_response({"status": "ok"})


async def describe(request: web.Request) -> web.Response:
    """GET /v1/agl/describe: where the services are (types.Describe)."""
    return web.json_response((await request.app[QUEUE].describe()).model_dump())


async def statistics(request: web.Request) -> web.Response:
    """GET /v1/agl/statistics: counts of the queue."""
    return web.json_response(await request.app[QUEUE].statistics())


async def rollouts(request: web.Request) -> web.Response:
    """GET /v1/agl/rollouts?limit&offset&status_in&rollout_id_contains: one page, the newest first."""
    query = request.query
    try:
        limit, offset = int(query.get("limit", "100")), int(query.get("offset", "0"))
    except ValueError:
        raise UsageError("limit and offset take whole numbers") from None
    statuses = query.getall("status_in", [])
    if unknown := set(statuses) - set(get_args(RolloutStatus)):
        raise UsageError(f"unknown status {', '.join(sorted(unknown))}; known are {', '.join(get_args(RolloutStatus))}")
    page = await request.app[QUEUE].query_rollouts(
        status_in=cast("list[RolloutStatus]", statuses) or None,
        rollout_id_contains=query.get("rollout_id_contains"),
        sort_by="start_time",
        sort_order="desc",
        limit=limit,
        offset=offset,
    )
    items = [rollout.model_dump(mode="json", exclude={"token"}) for rollout in page]
    return web.json_response({"items": items, "limit": limit, "offset": offset, "total": page.total})


ROUTES: dict[str, Handler] = {
    "/health": health,
    DESCRIBE_PATH: describe,
    "/v1/agl/health": health,
    "/v1/agl/statistics": statistics,
    "/v1/agl/rollouts": rollouts,
}


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ask for the token, and answer our errors as JSON with their status."""
    token = request.app[TOKEN]
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if token and request.path not in OPEN_PATHS and not hmac.compare_digest(given.encode(), token.encode()):
        return web.json_response({"detail": "a bearer token is needed: set AGL_TOKEN to the stack's token"}, status=401)
    try:
        return await handler(request)
    except AglError as error:
        return web.json_response({"detail": str(error), "error_type": type(error).__name__}, status=http_status(error))


def build_app(queue: QueueClient, token: str = "") -> web.Application:
    """The application over a queue client."""
    app = web.Application(middlewares=[guard])
    app[QUEUE] = queue
    app[TOKEN] = token
    app.add_routes([web.get(path, handler) for path, handler in ROUTES.items()])
    return app


async def serve(settings: Settings) -> None:
    """Serve on `web_port` until SIGTERM or SIGINT. Raises InUseError where the port is taken."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    token = settings.token.get_secret_value()
    tls = Tls.load(settings)
    async with QueueClient(settings.queue_address, token=token) as queue:
        app = build_app(queue, token)
        if tls is not None and tls.client_authority is not None:
            app.middlewares.append(require_certificate(OPEN_PATHS))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            await listen(runner, settings.host, settings.web_port, tls.context if tls else None)
        except OSError as error:
            await runner.cleanup()
            raise InUseError(f"port {settings.web_port} on {settings.host} is in use: choose another with AGL_WEB_PORT") from error
        url = f"{'https' if tls else 'http'}://{settings.host}:{settings.web_port}"
        await queue.announce("web", f"web@{settings.host}:{settings.web_port}", {"web": url})
        await stop.wait()
        await runner.cleanup()


def main() -> int:
    """Run the service; 0 after an ordered stop, 1 with one line on stderr where it cannot start."""
    import logging

    settings = Settings.load()
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        asyncio.run(serve(settings))
    except AglError as error:
        logging.getLogger(__name__).error("%s", error)
        return 1
    return 0
