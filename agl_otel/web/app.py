"""The aiohttp application: authentication, CORS, health and service discovery.

Routes are in rest.py, views.py, relay.py and jaeger/rest.py. SQL belongs to traces/.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from importlib.metadata import distribution
from typing import Final

from aiohttp import web

from agl_otel.compat.stores import LightningStore
from agl_otel.errors import AglError, UnavailableError, http_status
from agl_otel.net.auth import FEEDBACK as FEEDBACK_ACCESS
from agl_otel.net.auth import WEB, BrowserAccess
from agl_otel.net.bodies import Bodies
from agl_otel.net.http_server import Handler, browser_access, end_stalled, readable
from agl_otel.net.in_flight import InFlight
from agl_otel.queue.convert import reachable
from agl_otel.store import DESCRIBE_PATH
from agl_otel.telemetry.http import Requests
from agl_otel.telemetry.meters import Meters
from agl_otel.web import relay, static
from agl_otel.web.curves import Curves
from agl_otel.web.feedback import FEEDBACK, FEEDBACK_PER_MINUTE, LIMITS, PATH, Limits, admit
from agl_otel.web.jaeger import rest as jaeger_rest
from agl_otel.web.json_errors import json_crashes, json_errors
from agl_otel.web.openapi import document
from agl_otel.web.rest import ROUTES, health_of
from agl_otel.web.reviews import REVIEWS
from agl_otel.web.routes import PREFIX, STORE, add_table
from agl_otel.web.runs import CURVES
from agl_otel.web.views import SERVED, VIEWS

TOKEN = web.AppKey("token", str)
ORIGINS = web.AppKey("origins", frozenset[str])
TABLE: Final = (*VIEWS, *ROUTES, *REVIEWS, *FEEDBACK)
"""All routes below PREFIX."""
OPEN_PATHS: Final = frozenset({"/health", "/v1/agl/health"})
READ_ONLY_POSTS: Final = frozenset(PREFIX + route.path for route in TABLE if route.read_only)
"""Paths whose POST changes nothing."""
MAX_BODY_BYTES: Final = 64 << 20
IN_FLIGHT_BYTES: Final = 256 << 20
_CORS: Final = {
    "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
    "Access-Control-Allow-Headers": "Authorization, Content-Type, Content-Encoding",
    "Access-Control-Max-Age": "600",
    "Vary": "Origin",
}

_log = logging.getLogger(__name__)


async def health(request: web.Request) -> web.Response:
    """GET /health: status of the stack, and names of the services that are down."""
    return web.json_response(await health_of(request.app[STORE]))


async def describe(request: web.Request) -> web.Response:
    """GET /v1/agl/describe: addresses of the services (types.Describe), rewritten to the host that the caller used."""
    found = (await request.app[STORE].queue.describe()).model_dump()
    host = request.url.host or ""
    host = f"[{host}]" if ":" in host else host
    return web.json_response({name: _rewritten(value, host) for name, value in found.items()})


async def openapi(_: web.Request) -> web.Response:
    """GET /v1/agl/openapi.json."""
    return web.json_response(document(TABLE, distribution("agl-otel").version))


def _rewritten(address: object, host: str) -> object:
    if isinstance(address, list):
        return [_rewritten(item, host) for item in address]  # pyright: ignore[reportUnknownVariableType]  # a list of str
    return reachable(address, host) if isinstance(address, str) and ":" in address else address


def _is_read_only(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return request.method in ("GET", "HEAD") or (resource is not None and resource.canonical in READ_ONLY_POSTS)


def _refusal(request: web.Request) -> str | None:
    """Return why a request is refused; None if it is allowed."""
    if request.match_info.route.name == static.PAGE or admit(request, request.app[TOKEN]):
        return None
    own = "metrics" if request.path in relay.METRICS_PATHS else "prompts" if request.path == PREFIX + SERVED else "view"
    access = FEEDBACK_ACCESS if request.path == PREFIX + PATH else WEB
    return access.refusal(request.app[TOKEN], request.headers, *(["view", own] if _is_read_only(request) else []))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Require the token, and answer AglErrors as JSON with their status. Without a token, /health answers its status alone."""
    if (why := _refusal(request)) is not None:
        if request.path in OPEN_PATHS:
            return web.json_response({"status": (await health_of(request.app[STORE]))["status"]})
        return web.json_response({"detail": why}, status=401)
    try:
        return await handler(request)
    except AglError as error:
        headers = {"Retry-After": "1"} if isinstance(error, UnavailableError) else None
        if (status := http_status(error)) == 500:  # as where ClickHouse refuses a view's query
            _log.error("%s %s failed: %s", request.method, request.path, error)
        return web.json_response({"detail": str(error), "error_type": type(error).__name__}, status=status, headers=headers)


def _origin(request: web.Request) -> str:
    """Return the request's origin if it is a configured one; else an empty text."""
    origin, allowed = request.headers.get("Origin", ""), request.app[ORIGINS]
    return origin if allowed & {origin, "*"} else ""


@web.middleware
async def cors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer what a browser asks before a cross-origin request."""
    preflight = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    return web.Response(status=204) if preflight and _origin(request) else await handler(request)


async def allow_origin(request: web.Request, answer: web.StreamResponse) -> None:
    """Let pages of the configured origins read an answer, also one that is sent in pieces: its headers go before its middlewares end."""
    if origin := _origin(request):
        answer.headers.update({**_CORS, "Access-Control-Allow-Origin": origin})


def build_app(
    store: LightningStore,
    token: str = "",
    cors_origins: Sequence[str] = (),
    names: Collection[str] | None = None,
    *,
    in_flight_bytes: int = IN_FLIGHT_BYTES,
    feedback_per_minute: int = FEEDBACK_PER_MINUTE,
) -> web.Application:
    """Build the application over a store that is open in the running event loop.

    `names`: see `auth.BrowserAccess`; `in_flight_bytes`: of all bodies that are held at one time; `feedback_per_minute`: of one key.
    """
    origins = frozenset(origin.strip() for origin in cors_origins if origin.strip())
    visitors = browser_access(BrowserAccess(names, origins), page=static.PAGE)
    meters = Meters()
    count = Requests(meters).counted
    bodies = Bodies(InFlight(in_flight_bytes), MAX_BODY_BYTES)
    app = web.Application(middlewares=[json_crashes, count, cors, json_errors, visitors, readable, guard, bodies.held])
    end_stalled(app)
    app.on_response_prepare.append(allow_origin)
    app[STORE] = store
    app[TOKEN] = token
    app[ORIGINS] = origins
    app.router.add_get("/health", health)
    app.router.add_get(DESCRIBE_PATH, describe)
    app[CURVES] = Curves(store)
    app[LIMITS] = Limits(feedback_per_minute)
    app.router.add_get(PREFIX + "/openapi.json", openapi)
    add_table(app, TABLE)
    jaeger_rest.add_routes(app)
    relay.add_routes(app, meters, token)
    static.add_routes(app)
    return app
