"""OTLP over HTTP and metrics on the web service's port: passed on to the stack's collector, byte for byte.

So one address is enough for a client of Agent Lightning 0.3. Who sends much sends to the collector itself.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import aiohttp
from aiohttp import web

from agl_otel.errors import UnavailableError
from agl_otel.tls import connector
from agl_otel.web.alarms import Alarms
from agl_otel.web.exposition import metric_lines
from agl_otel.web.routes import STORE

OTLP_PATHS: Final = ("/v1/traces", "/v1/logs", "/v1/metrics")
METRICS_PATHS: Final = ("/metrics", "/v1/prometheus", "/v1/prometheus/")
CALL_SECONDS: Final = 60.0
_REQUEST_HEADERS: Final = (
    "Content-Type",
    "Content-Encoding",
    "Accept-Encoding",
    "Authorization",
    "agl-ack",
    "agl-rollout-id",
    "agl-attempt-id",
)
_ANSWER_HEADERS: Final = ("Content-Type", "Content-Encoding", "Retry-After")
SESSION: Final = web.AppKey("session", aiohttp.ClientSession)
ALARMS: Final = web.AppKey("alarms", Alarms)
_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _collector(request: web.Request) -> str:
    url = (await request.app[STORE].queue.describe()).collector_http
    if url is None:
        raise UnavailableError("the stack has no collector (yet)")
    return url


async def otlp(request: web.Request) -> web.Response:
    """POST /v1/traces, /v1/logs, /v1/metrics: the collector's answer."""
    headers = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
    return await _passed("POST", await _collector(request) + request.path, request, headers, await request.read())


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: the collector's page, where it answers; before it the queue's counts, and what is refused for training (alarms.py)."""
    counts = await request.app[STORE].queue.statistics()
    by_status = [({"status": status}, count) for status, count in sorted(counts["rollouts_by_status"].items())]
    lines = metric_lines("agl_rollouts", "gauge", "Rollouts by status.", by_status)
    lines += metric_lines("agl_claimable", "gauge", "Rollouts that wait to be claimed.", [({}, counts["claimable"])])
    waiting = counts["oldest_claimable_age_seconds"] or 0.0
    lines += metric_lines("agl_oldest_claimable_age_seconds", "gauge", "How long the first of them waits; 0 without one.", [({}, waiting)])
    headers = {name: request.headers[name] for name in ("Authorization",) if name in request.headers}
    theirs: Any = b""
    up = True
    try:
        answer = await _passed("GET", await _collector(request) + "/metrics", request, headers, None)
    except UnavailableError as error:  # of which this page has to tell, and of the rest
        _log.warning("metrics without the collector's: %s", error)
        up = False
    else:
        if answer.status != 200:
            return answer
        theirs = answer.body
    lines += metric_lines("agl_collector_up", "gauge", "Whether the collector answers; its figures are missing where not.", [({}, int(up))])
    alarms = await request.app[ALARMS].page()
    return web.Response(body="\n".join([*lines, alarms]).encode() + theirs, content_type="text/plain")


async def _passed(method: str, url: str, request: web.Request, headers: dict[str, str], body: bytes | None) -> web.Response:
    try:
        async with request.app[SESSION].request(method, url, data=body, headers=headers) as answer:
            kept = {name: answer.headers[name] for name in _ANSWER_HEADERS if name in answer.headers}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(f"the collector at {url} does not answer: {error!r}") from None


async def _session(app: web.Application):
    timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False, connector=connector()) as session:
        app[SESSION] = session
        yield


def add_routes(app: web.Application) -> None:
    """Put the routes into `app`, which holds the store under STORE."""
    app.cleanup_ctx.append(_session)
    app[ALARMS] = Alarms(app[STORE])
    for path in OTLP_PATHS:
        app.router.add_post(path, otlp)
    for path in METRICS_PATHS:
        app.router.add_get(path, metrics)
