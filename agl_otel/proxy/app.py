"""The proxy's routes. A call names its attempt by path (/rollout/{r}/attempt/{a}[/v1]/…), else by W3C baggage, else not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from aiohttp import web
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context

from agl_otel import errors, semconv
from agl_otel.errors import AglError, InvalidIdError, UsageError
from agl_otel.instrumentation.context import Key, key_of
from agl_otel.instrumentation.guard import failures
from agl_otel.instrumentation.setup import Telemetry
from agl_otel.proxy.attempts import Attempts
from agl_otel.proxy.dialects import DIALECTS, Dialect
from agl_otel.proxy.forward import SILENCE_SECONDS, Forwarder, error_response
from agl_otel.proxy.recorder import Recorder
from agl_otel.proxy.reply import parse_object
from agl_otel.proxy.upstream import Upstreams

MAX_BODY_BYTES: Final = 64 << 20
CLOSE_WAIT_SECONDS: Final = 1.0  # for calls of an attempt whose agent has just gone
FLUSH_SECONDS: Final = 8.0  # shorter than a runner waits for the answer
SCOPE: Final = "/rollout/{rollout_id}/attempt/{attempt_id}"
PREFIXES: Final = ("", "/v1", SCOPE, f"{SCOPE}/v1")
KNOWN: Final = f"POST [{SCOPE}][/v1]/{{{','.join(DIALECTS)}}}, GET [{SCOPE}][/v1]/models, POST {SCOPE}/close, POST /close, GET /health"
logger = logging.getLogger("agl_otel.proxy")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Proxy:
    """The application and what it holds."""

    def __init__(
        self,
        upstreams: Upstreams,
        telemetry: Telemetry,
        *,
        token: str = "",
        silence_seconds: float = SILENCE_SECONDS,
        flush_seconds: float = FLUSH_SECONDS,
    ) -> None:
        self._upstreams = upstreams
        self._telemetry = telemetry
        self._token = token
        self._silence_seconds = silence_seconds
        self._flush_seconds = flush_seconds
        self._attempts = Attempts(lambda key: telemetry.forget(*key))
        self._recorder = Recorder(telemetry.tracer("agl_otel.proxy"), self._attempts)
        self._forwarder: Forwarder | None = None
        self._call_ended = asyncio.Event()

    def app(self) -> web.Application:
        """The aiohttp application; run it with `handler_cancellation=True`, or calls of clients that went away run on."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        for prefix in PREFIXES:
            for dialect in DIALECTS.values():
                app.router.add_post(f"{prefix}/{dialect.path}", self._call(dialect))
            app.router.add_get(f"{prefix}/models", self._models)
        app.router.add_post(f"{SCOPE}/close", self._close_one)
        app.router.add_post("/close", self._close_many)
        app.router.add_get("/health", self._health)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self._forwarder = Forwarder(self._upstreams, self._recorder, silence_seconds=self._silence_seconds)

    async def _stop(self, _: web.Application) -> None:
        await self._running().close()

    def _running(self) -> Forwarder:
        assert self._forwarder is not None, "the application was not started"
        return self._forwarder

    def _call(self, dialect: Dialect) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._running().call(request, _key(request), dialect)
            finally:
                self._call_ended.set()

        return handle

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._running().get(request, _key(request), "models")

    async def _health(self, _: web.Request) -> web.Response:
        counts = {"attempts": len(self._attempts), **self._recorder.counts}
        return web.json_response({"status": "ok", "marker": self._telemetry.marker, "counts": counts, "failures": failures})

    async def _close_one(self, request: web.Request) -> web.Response:
        self._authorise(request)
        key = _path_key(request)
        assert key is not None, "the route has both ids"
        markers, spans, dropped = await self._close([key])
        return web.json_response({"marker": markers[0], "spans": spans[0], "dropped": dropped[0]})

    async def _close_many(self, request: web.Request) -> web.Response:
        self._authorise(request)
        body = parse_object(await request.read())
        pairs = body.get("attempts") if body is not None else None
        if not isinstance(pairs, list) or not all(
            isinstance(p, list) and len(p) == 2 and all(isinstance(i, str) for i in p) for p in pairs
        ):  # pyright: ignore[reportUnknownArgumentType]  # any JSON
            raise UsageError('the body must be {"attempts": [[rollout id, attempt id], …]}')
        markers, spans, dropped = await self._close([(str(r), str(a)) for r, a in pairs])
        first = markers[0] if markers else self._telemetry.marker
        return web.json_response({"marker": first, "markers": markers, "spans": spans, "dropped": dropped})

    async def _close(self, keys: Sequence[Key]) -> tuple[list[str], list[int], list[int]]:
        """Seal and flush attempts: their markers, spans and drops (zeros for one that made no call here)."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_SECONDS):
                while any(self._attempts.active(key) for key in keys):
                    self._call_ended.clear()
                    await self._call_ended.wait()
        counts = await asyncio.to_thread(self._telemetry.seal_counts, keys, timeout_seconds=self._flush_seconds)
        known = [counts.get(key) for key in keys]
        markers = [count.marker if count is not None else self._telemetry.marker for count in known]
        return markers, [c.spans if c is not None else 0 for c in known], [c.dropped if c is not None else 0 for c in known]

    def _authorise(self, request: web.Request) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            raise web.HTTPUnauthorized(text="a bearer token is needed: set AGL_TOKEN to the stack's token")


def _path_key(request: web.Request) -> Key | None:
    rollout_id, attempt_id = request.match_info.get("rollout_id"), request.match_info.get("attempt_id")
    if rollout_id is None or attempt_id is None:
        return None
    for name, value in (("rollout id", rollout_id), ("attempt id", attempt_id)):
        if not semconv.is_valid_id(value):
            raise InvalidIdError(f"{name} {value[:140]!r} in the path is not allowed: use 1 to 128 of the characters A-Z a-z 0-9 . _ : -")
    return rollout_id, attempt_id


def _key(request: web.Request) -> Key | None:
    key = _path_key(request)
    if key is None and "baggage" in request.headers:
        key = key_of(W3CBaggagePropagator().extract({"baggage": request.headers["baggage"]}, Context()))
    return key


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPNotFound:
        return error_response(404, f"no route {request.method} {request.path}. Known: {KNOWN}", "not_found")
    except web.HTTPException as error:
        return error_response(error.status, error.text or error.reason, str(error.status))
    except AglError as error:
        status = errors.http_status(error)
        return error_response(status, str(error), type(error).__name__, {"Retry-After": "1"} if error.retryable else None)
