"""Forward OTLP over HTTP to the stack's collector, byte for byte, and merge the metrics pages of all services.

This lets clients of Agent Lightning 0.3 use one address. High-volume senders should use the collector's own port.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import aiohttp
from aiohttp import web

from agl_otel.errors import UnavailableError
from agl_otel.net.bodies import body_of
from agl_otel.net.http_server import while_connected
from agl_otel.net.tls import connector
from agl_otel.telemetry.exposition import CONTENT_TYPE, merged, text_of
from agl_otel.telemetry.meters import Family, Meters, Sample
from agl_otel.text import error_text
from agl_otel.web.alarms import Alarms
from agl_otel.web.json_errors import RELAYED
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
METERS: Final = web.AppKey("meters", Meters)
OWN_TOKEN: Final = web.AppKey("own_token", str)
_log = logging.getLogger(__name__)


async def _collector(request: web.Request) -> str:
    url = (await request.app[STORE].queue.describe()).collector_http
    if url is None:
        raise UnavailableError("the stack has no collector (yet)")
    return url


async def otlp(request: web.Request) -> web.Response:
    """POST /v1/traces, /v1/logs, /v1/metrics: return the collector's response."""
    headers = {name: request.headers[name] for name in _REQUEST_HEADERS if name in request.headers}
    passed = _passed("POST", await _collector(request) + request.path, request, headers, await body_of(request, packed=True))
    return await while_connected(request, passed)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics: this service's metrics and alarms (alarms.py), the queue's, and those of every collector that responds.

    `?relay=0` leaves out the other services, for a Prometheus that scrapes them itself.
    """
    queue = request.app[STORE].queue
    described = await queue.describe()
    urls = described.collectors or ([described.collector_http] if described.collector_http else [])
    pages = dict(zip(urls, await asyncio.gather(*(_collector_page(request, url) for url in urls)), strict=True))
    answering = {url: page for url, page in pages.items() if page is not None}
    up: list[Sample] = [({"collector": url} if len(urls) > 1 else {}, int(url in answering)) for url in urls] or [({}, 0)]
    about_up = Family("agl.collector_up", "gauge", "Whether the collector responds; its metrics are missing otherwise.", up)
    collectors = merged(answering, "collector") if len(urls) > 1 else "".join(answering.values())
    own = text_of([about_up, *await families(request.app)])
    text = own if request.query.get("relay") == "0" else own + await queue.metrics() + collectors
    return web.Response(body=text.encode(), headers={"Content-Type": CONTENT_TYPE})


async def families(app: web.Application) -> list[Family]:
    """Return this service's own metrics: rollouts by status, alarms, HTTP requests."""
    counts = await app[STORE].queue.statistics()
    by_status: list[Sample] = [({"status": status}, count) for status, count in sorted(counts["rollouts_by_status"].items())]
    waiting: list[Sample] = [({}, counts["oldest_claimable_age_seconds"] or 0.0)]
    return [
        Family("agl.rollouts", "gauge", "Rollouts by status.", by_status),
        Family("agl.claimable", "gauge", "Rollouts that wait to be claimed.", [({}, counts["claimable"])]),
        Family("agl.oldest_claimable_age_seconds", "gauge", "Waiting time of the oldest of them; 0 if there is none.", waiting),
        *await app[ALARMS].families(),
        *app[METERS].families(),
    ]


async def _collector_page(request: web.Request, url: str) -> str | None:
    """Return the collector's /metrics page: empty if it has none, None if it does not respond."""
    token = request.app[OWN_TOKEN]  # the caller's may be one for this service alone
    headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
    try:
        async with request.app[SESSION].get(url + "/metrics", headers=headers) as answer:
            text = await answer.text()
            if answer.status in (200, 404):  # the OpenTelemetry Collector serves its metrics on another port
                return text if answer.status == 200 else ""
            _log.warning("no metrics of the collector at %s: it answers %d: %.200s", url, answer.status, text)
    except (aiohttp.ClientError, TimeoutError) as error:  # shown as agl.collector_up
        _log.warning("no metrics of the collector at %s: %s", url, error_text(error))
    return None


async def _passed(method: str, url: str, request: web.Request, headers: dict[str, str], body: bytes | None) -> web.Response:
    try:
        async with request.app[SESSION].request(method, url, data=body, headers=headers) as answer:
            kept = {name: answer.headers[name] for name in _ANSWER_HEADERS if name in answer.headers}
            body = await answer.read()
            request[RELAYED] = True
            return web.Response(status=answer.status, headers=kept, body=body)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise UnavailableError(f"the collector at {url} does not answer: {error_text(error)}") from None


async def _session(app: web.Application):
    timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False, connector=connector()) as session:
        app[SESSION] = session
        yield


def add_routes(app: web.Application, meters: Meters, token: str) -> None:
    """Add the routes to `app`, which holds the store under STORE. `meters`: this service's own; `token`: the stack's."""
    app[METERS] = meters
    app[OWN_TOKEN] = token
    app.cleanup_ctx.append(_session)
    app[ALARMS] = Alarms(app[STORE])
    for path in OTLP_PATHS:
        app.router.add_post(path, otlp)
    for path in METRICS_PATHS:
        app.router.add_get(path, metrics)
