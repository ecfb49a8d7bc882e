"""The proxy's routes. A call names its attempt by path (/rollout/{r}/attempt/{a}[/v1]/…), else by W3C baggage, else not at all.

If the stack has a token, a call of an attempt needs that attempt's key (net/auth.py), and control routes need the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any, Final, NamedTuple, NoReturn, cast

from aiohttp import web
from multidict import CIMultiDict
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context

from agl_otel import errors
from agl_otel.errors import AglError, InvalidIdError, RefusedError, UnavailableError, UsageError
from agl_otel.net import auth
from agl_otel.net.bodies import Bodies, body_of
from agl_otel.net.front import Client, SmallRequest
from agl_otel.net.http_server import FRONT, Handler, browser_access, readable
from agl_otel.net.in_flight import InFlight
from agl_otel.proxy.agent import FrontAgent, Headers, RequestAgent
from agl_otel.proxy.answer import error_response
from agl_otel.proxy.attempts import Attempts
from agl_otel.proxy.dialects import CHAT, DIALECTS, Dialect
from agl_otel.proxy.forward import Forwarder, Limits
from agl_otel.proxy.gate import Gate
from agl_otel.proxy.google.agent import GoogleAgent, as_google, counted, google_headers
from agl_otel.proxy.google.models import asks_google, models
from agl_otel.proxy.journal import Journal
from agl_otel.proxy.litellm import Litellm
from agl_otel.proxy.models import ModelList
from agl_otel.proxy.recorder import Recorder
from agl_otel.proxy.recovery import JournalRecovery
from agl_otel.proxy.reply import Json, dicts, parse_object
from agl_otel.proxy.unknown_paths import UnknownPaths, scoped
from agl_otel.proxy.upstream import TOKENIZE, Upstreams
from agl_otel.proxy.witness import Queue, Witnesses
from agl_otel.telemetry.http import CRASHED, DISCONNECTED, Requests, page
from agl_otel.telemetry.meters import Meters, Sample
from agl_otel.telemetry.setup import Telemetry
from agl_otel_hook import conventions
from agl_otel_hook.context import Key, key_of
from agl_otel_hook.guard import failures
from agl_otel_hook.ledger import Count

SCOPE_NAME: Final = "agl_otel.proxy"
"""The instrumentation scope of the spans of calls."""
MAX_BODY_BYTES: Final = 64 << 20
EXPIRE_SECONDS: Final = 30.0
CLOSE_WAIT_SECONDS: Final = 1.0  # for calls in flight of an attempt whose agent has just ended
FLUSH_SECONDS: Final = 8.0  # shorter than a runner's timeout
SCOPE: Final = "/rollout/{rollout_id}/attempt/{attempt_id}"
PREFIXES: Final = (f"{SCOPE}/v1", SCOPE, "/v1", "")
"""Routes are matched in this order; the form that runners give to agents comes first."""
_LONGEST_PATH: Final = 400  # two ids of 128 characters each
_ATTEMPTS_CALL: Final = re.compile(rf"/rollout/([^/]+)/attempt/([^/]+)(/v1|)/({'|'.join(map(re.escape, DIALECTS))})")
PASSED: Final = ("messages/count_tokens",)
"""POST routes that are no model calls: forwarded, not recorded."""
GOOGLES_MODELS: Final = "/{version:v1(?:alpha|beta)?}/models"
GOOGLES_MODEL: Final = f"{GOOGLES_MODELS}/{{model:.+}}"
GOOGLE: Final = f"{GOOGLES_MODEL}:{{method:[A-Za-z]+}}"
PAUSE_WAIT_SECONDS: Final = 60.0
MAX_PAUSE_WAIT_SECONDS: Final = 3600.0
KNOWN: Final = (
    f"POST [{SCOPE}][/v1]/{{{','.join((*DIALECTS, *PASSED))}}}, GET [{SCOPE}][/v1]/models, POST {SCOPE}/close, "
    f"POST [{SCOPE}]/{{v1,v1beta,v1alpha}}/models/MODEL:{{generateContent,streamGenerateContent,countTokens}}, "
    f"GET [{SCOPE}]/{{v1,v1beta,v1alpha}}/models[/MODEL], "
    "POST /close, POST /delete, POST /pause, POST /resume, POST /model_list, GET /health, GET /metrics"
)
logger = logging.getLogger("agl_otel.proxy")


class Proxy:
    """The application and its state."""

    def __init__(
        self,
        upstreams: Upstreams,
        telemetry: Telemetry,
        *,
        token: str = "",
        own_keys: bool = False,
        limits: Limits | None = None,
        flush_seconds: float = FLUSH_SECONDS,
        models: ModelList | None = None,
        gate: Gate | None = None,
        litellm: Litellm | None = None,
        names: Collection[str] | None = None,
        journal: Journal | None = None,
        recovery: JournalRecovery | None = None,
        queue: Queue | None = None,
        address: str = "",
    ) -> None:
        """`own_keys`: whether calls of no attempt may bring a provider's key in place of the token.

        `names`: see `auth.BrowserAccess`; `queue`: gets an announcement, before an attempt's first call, that the proxy at `address`
        serves it.
        """
        self._upstreams = upstreams
        self._telemetry = telemetry
        self._token = token
        self._own_keys = own_keys
        self._limits = limits or Limits()
        self._flush_seconds = flush_seconds
        self._models = models if models is not None else ModelList()
        self._gate = gate or Gate()
        self._litellm = litellm
        self._visitors = auth.BrowserAccess(names)
        self._attempts = Attempts(self._forget, idle=upstreams.forget)
        self._journal = journal
        self._recovery = recovery
        self._recorder = Recorder(telemetry.whole_spans(SCOPE_NAME), self._attempts, journal)
        self._witnesses = Witnesses(queue, address, self._recorder.counts) if queue is not None else None
        if journal is not None:
            telemetry.on_settled(journal.settled)
        self._forwarder: Forwarder | None = None
        self._call_ended = asyncio.Event()
        self._in_flight = InFlight(self._limits.held_bytes, "AGL_PROXY_MAX_IN_FLIGHT_BYTES")
        self._calls: set[asyncio.Task[None]] = set()
        """Calls that were taken ahead of aiohttp."""
        self.meters = Meters()
        self._requests = Requests(self.meters)
        self._unknown_paths = UnknownPaths()
        self.meters.gauge("agl.proxy.attempts", "Attempts that are remembered.", lambda: [({}, len(self._attempts))])
        self.meters.gauge("agl.proxy.under_way", "Model calls under way.", lambda: [({}, self._gate.in_flight)])
        self.meters.gauge("agl.proxy.held", "Model calls that wait for new weights.", lambda: [({}, self._gate.held)])
        self.meters.gauge("agl.proxy.total", "Model calls, and what was missing in them: /health's counts.", self._counted, kind="counter")
        self.meters.gauge("agl.proxy.arms.total", "Model calls by the LLM resource that they went to.", self._arms, kind="counter")

    def app(self, *, fronted: bool = True) -> web.Application:
        """The aiohttp application; run it with `handler_cancellation=True`, or calls of disconnected clients are not cancelled.

        `fronted`: small calls of attempts are taken ahead of it (net/front.py), and so of middlewares that are added to it.
        """
        bodies, visitors = Bodies(self._in_flight, MAX_BODY_BYTES), browser_access(self._visitors)
        app = web.Application(middlewares=[self._requests.counted, visitors, readable, self._errors_as_json, bodies.held])
        if fronted:
            app[FRONT] = (lambda path: _called(path) is not None, self._take, lambda: "the model proxy speaks HTTP/1.1")
        for prefix in PREFIXES:
            for dialect in DIALECTS.values():
                app.router.add_post(f"{prefix}/{dialect.path}", self._call(dialect))
            app.router.add_post(f"{prefix}{GOOGLE}", self._call_of_google)
            for path in PASSED:
                app.router.add_post(f"{prefix}/{path}", self._pass_through(path))
            for path in ("/models", GOOGLES_MODELS, GOOGLES_MODEL):
                app.router.add_get(f"{prefix}{path}", self._list_models)
        app.router.add_post(f"{SCOPE}/close", self._close_one)
        app.router.add_post("/close", self._close_many)
        app.router.add_post("/delete", self._delete)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/model_list", self._replace_models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self._forwarder = Forwarder(
            self._upstreams,
            self._recorder,
            self._attempts,
            self._gate,
            limits=self._limits,
            token=self._token,
            litellm=self._litellm,
            witnesses=self._witnesses,
        )
        await self._forwarder.start()
        self._expiring = asyncio.create_task(self._expire(), name="expire")
        if self._recovery is not None:
            await self._recovery.start()

    def _forget(self, key: Key) -> None:
        self._telemetry.forget(*key)
        self._upstreams.forget(key)
        if self._witnesses is not None:
            self._witnesses.forget(key)

    async def _expire(self) -> NoReturn:
        while True:
            await asyncio.sleep(EXPIRE_SECONDS)
            self._attempts.expire()

    async def _stop(self, _: web.Application) -> None:
        self._expiring.cancel()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._running().close()
        running = [key for key in self._telemetry.ledger.unrecorded() if not self._attempts.is_closed(key)]
        with contextlib.suppress(UnavailableError):  # the journal has them
            await self._last_seals(running)
        if self._witnesses is not None:
            await self._witnesses.close()
        if self._recovery is not None:
            await self._recovery.stop()

    def _running(self) -> Forwarder:
        assert self._forwarder is not None, "the application was not started"
        return self._forwarder

    def _call(self, dialect: Dialect) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await self._called_by(RequestAgent(request), request, dialect)

        return handle

    async def _call_of_google(self, request: web.Request) -> web.StreamResponse:
        try:
            agent = GoogleAgent(request)
            if agent.counts:
                key, agent.own_key = self._allowed(request, agent.headers)
                return counted(await self._running().pass_through(agent, key, TOKENIZE))
            answer = await self._called_by(agent, request, CHAT)
        except (AglError, RecursionError) as error:
            return as_google(_answer_to(error))
        return as_google(answer) if isinstance(answer, web.Response) and not answer.prepared else answer

    async def _called_by(self, agent: RequestAgent, request: web.Request, dialect: Dialect) -> web.StreamResponse:
        key, agent.own_key = self._allowed(request, agent.headers)
        try:
            refused = await self._running().call(agent, key, dialect)
        except (AglError, RecursionError, ConnectionResetError):
            raise
        except Exception:
            logger.exception("a call failed")
            refused = _crashed()
        finally:
            self._call_ended.set()
        if refused is not None and not agent.begun:
            return refused
        if refused is not None:
            agent.break_off()
        return agent.answered()

    def _take(self, request: SmallRequest, client: Client) -> bool:
        """Take an attempt's call that may be made (front.py); others are refused on the way of `_call`."""
        headers, called = CIMultiDict(request.headers), _called(request.path)
        if called is None or self._visitors.refusal("POST", headers) is not None:
            return False
        if not auth.may_call(self._token, auth.shown_to_proxy(headers), *called.key):
            return False
        call = asyncio.create_task(self._answer(FrontAgent(request, headers, client), called))
        client.gone = call.cancel
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return True

    async def _answer(self, agent: FrontAgent, called: _Called) -> None:
        """Make a call that was taken, and do for it what the middlewares do for others."""
        began, held, status = perf_counter(), 0, CRASHED
        try:
            self._in_flight.reserve(agent.size)
            held = agent.size
            refused = await self._running().call(agent, called.key, called.dialect)
            status = await agent.finish(refused)
        except (asyncio.CancelledError, ConnectionResetError):
            status = DISCONNECTED
            agent.break_off()
        except (AglError, RecursionError) as error:
            status = await agent.finish(_answer_to(error))
        except Exception:
            logger.exception("a call failed")
            await agent.finish(_crashed())
        finally:
            self._in_flight.release(held)
            self._call_ended.set()
            self._requests.ended(began, called.route, "POST", status)

    def _pass_through(self, path: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            agent = RequestAgent(request)
            key, agent.own_key = self._allowed(request, agent.headers)
            return await self._running().pass_through(agent, key, path)

        return handle

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        asked = request.match_info.get("model")
        if asks_google(request):
            try:
                return models(await self._listed(request, RequestAgent(request, google_headers(request)), asked), asked)
            except (AglError, RecursionError) as error:
                return as_google(_answer_to(error))
        if asked is not None:
            raise web.HTTPNotFound
        return await self._listed(request, RequestAgent(request))

    async def _listed(self, request: web.Request, agent: RequestAgent, asked: str | None = None) -> web.Response:
        """Return OpenAI's list of models; of those that the proxy knows only `asked`, if one is it, or is a pattern that matches."""
        key, agent.own_key = self._allowed(request, agent.headers)
        if key is None and (names := [*dict.fromkeys([*await self._upstreams.names(), *self._models.names()])]):
            names = [asked] if asked and (asked in names or self._models.find(asked)) else names
            cards = [{"id": name, "object": "model", "created": 0, "owned_by": "agl-otel"} for name in names]
            return web.json_response({"object": "list", "data": cards})
        return await self._running().pass_through(agent, key, "models")

    async def _health(self, request: web.Request) -> web.Response:
        """Answer with the status; with details only if the token is sent or the stack has none."""
        forwarder = self._running()
        forwarder.settle()
        trouble = self._journal.trouble if self._journal is not None else ""
        status = {"status": "degraded" if trouble else "ok"}  # calls are served all the same
        if self._refusal(request, "metrics") is not None:
            return web.json_response(status)
        return web.json_response(
            {
                **status,
                **({"reason": trouble} if trouble else {}),
                "marker": self._telemetry.marker,
                "paused": self._gate.mode,
                "under_way": self._gate.in_flight,
                "held": self._gate.held,
                "version": forwarder.version,
                "down": forwarder.health.down(),
                "models": self._models.names(),
                "litellm": self._litellm.state if self._litellm is not None else None,
                "arms": dict(self._recorder.arms),
                "counts": {"attempts": len(self._attempts), **self._recorder.counts},
                "unknown_paths": self._unknown_paths.as_json(),
                "failures": failures,
            }
        )

    async def _metrics(self, request: web.Request) -> web.Response:
        self._authorise(request, "metrics")
        return page(self.meters)

    def _counted(self) -> list[Sample]:
        return [({"what": what}, count) for what, count in sorted(self._recorder.counts.items())]

    def _arms(self) -> list[Sample]:
        return [({"arm": arm}, count) for arm, count in sorted(self._recorder.arms.items())]

    async def _pause(self, request: web.Request) -> web.Response:
        """Close the gate ({"mode": "hold" or "refuse", "wait_seconds": for calls in flight}); answer with how many are left."""
        self._authorise(request)
        body = await _object(request)
        mode, wait = body.get("mode", "hold"), body.get("wait_seconds", PAUSE_WAIT_SECONDS)
        if mode not in ("hold", "refuse") or not isinstance(wait, (int, float)) or not 0 <= wait <= MAX_PAUSE_WAIT_SECONDS:  # no NaN
            raise UsageError(f'POST /pause takes {{"mode": "hold" or "refuse", "wait_seconds": 0 to {MAX_PAUSE_WAIT_SECONDS:.0f}}}')
        left = await self._gate.close(mode, wait_seconds=wait)
        return web.json_response({"paused": mode, "under_way": left})

    async def _resume(self, request: web.Request) -> web.Response:
        """Open the gate ({"version": the weights version from now on, for servers that do not report one})."""
        self._authorise(request)
        body = await _object(request)
        if "version" in body:
            self._running().version = str(body["version"]) if body["version"] is not None else None
        self._gate.open()
        return web.json_response({"paused": None, "version": self._running().version})

    async def _replace_models(self, request: web.Request) -> web.Response:
        """Replace the model list ({"model_list": [{"model_name", "litellm_params"}]})."""
        self._authorise(request)
        self._models.replace(dicts((await _object(request)).get("model_list")))
        return web.json_response({"models": self._models.names()})

    async def _close_one(self, request: web.Request) -> web.Response:
        self._authorise(request)
        key = _path_key(request)
        assert key is not None, "the route has both ids"
        (counts,) = await self._close([key])
        if counts is None:
            raise UnavailableError("what a proxy that died left of this attempt could not be stored yet: is the collector running?")
        own = next((count for count in counts if not count.before), _Closed(self._telemetry.marker, 0, 0))
        of_all = {count.marker: count.spans for count in counts}
        return web.json_response({"marker": own.marker, "spans": own.spans, "dropped": own.dropped, "counts": of_all})

    async def _close_many(self, request: web.Request) -> web.Response:
        self._authorise(request)
        body = parse_object(await body_of(request))
        pairs = body.get("attempts") if body is not None else None
        if not isinstance(pairs, list) or not all(
            isinstance(p, list) and len(p) == 2 and all(isinstance(i, str) for i in p) for p in pairs
        ):  # pyright: ignore[reportUnknownArgumentType]  # any JSON
            raise UsageError('the body must be {"attempts": [[rollout id, attempt id], …]}')
        closed = await self._close([(str(r), str(a)) for r, a in pairs])
        counts_by_marker = [{count.marker: count.spans for count in counts} if counts is not None else None for counts in closed]
        return web.json_response({"counts": counts_by_marker})

    async def _close(self, keys: Sequence[Key]) -> list[list[_Closed] | None]:
        """Close, seal and flush attempts; return the counts of this process, and of dead ones on this disk, for each.

        A call still in flight counts, and is missing until it is stored. The result is None for an attempt with spans of a dead process
        that could not be stored yet. Raises UnavailableError.
        """
        settle = self._running().settle
        settle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_WAIT_SECONDS):
                while any(self._attempts.active(key) for key in keys):
                    self._call_ended.clear()
                    await self._call_ended.wait()
                    settle()
        for key in keys:
            self._attempts.close(key)
        counts = await self._last_seals(keys)
        before: list[list[Count] | None] = [[] for _ in keys]
        if self._recovery is not None:
            before = await self._recovery.counts(keys, timeout_seconds=self._flush_seconds)
        own = [[count] if (count := counts.get(key)) is not None else [] for key in keys]
        return [
            [
                _Closed(c.marker, c.spans + c.open, c.dropped, before=earlier)
                for each, earlier in ((mine, False), (theirs, True))
                for c in each
            ]
            if theirs is not None
            else None
            for mine, theirs in zip(own, before, strict=True)
        ]

    async def _last_seals(self, keys: Sequence[Key]) -> dict[Key, Count]:
        """Send the last seals and flush; return this process's count for each attempt. Raises UnavailableError."""
        counts = await asyncio.to_thread(self._telemetry.seal_counts, keys, timeout_seconds=self._flush_seconds, closing=True)
        if self._journal is not None:
            self._journal.closed(keys)
        return counts

    async def _delete(self, request: web.Request) -> web.Response:
        """Delete rollouts from the journals ({"rollouts": [rollout ids]}); the collector deletes them from ClickHouse."""
        self._authorise(request)
        ids = (await _object(request)).get("rollouts")
        if not isinstance(ids, list) or not all(isinstance(each, str) for each in cast("list[Any]", ids)):
            raise UsageError('POST /delete takes {"rollouts": [rollout ids]}')
        gone = cast("list[str]", ids)
        if self._journal is not None:
            await asyncio.to_thread(self._journal.forget, gone)
        if self._recovery is not None:
            await self._recovery.forget(gone)
        return web.json_response({"deleted": len(gone)})

    @web.middleware
    async def _errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: answer with errors in OpenAI's form, and count what an attempt posts to an unknown path."""
        try:
            return await handler(request)
        except web.HTTPNotFound:
            key, path = scoped(request.path)
            if request.method == "POST" and (key := key or _key(request)) is not None:
                self._unknown_paths.add(key, path)
            return error_response(404, f"no route {request.method} {request.path}. Known: {KNOWN}", "not_found")
        except web.HTTPException as error:
            return error_response(error.status, error.text or error.reason, str(error.status))
        except (AglError, RecursionError) as error:
            return _answer_to(error)

    def _refusal(self, request: web.Request, *scopes: str) -> str | None:
        return auth.PROXY.refusal_of_all(self._token, [auth.shown_to_proxy(request.headers)], *scopes)

    def _authorise(self, request: web.Request, *scopes: str) -> None:
        if (why := self._refusal(request, *scopes)) is not None:
            raise web.HTTPUnauthorized(text=why)

    def _allowed(self, request: web.Request, headers: Headers) -> tuple[Key | None, bool]:
        """Return the attempt that the call names, if any, and whether its client sends a provider's key in place of ours.

        Raises RefusedError if its key opens neither that attempt nor the proxy.
        """
        key, given, own_key = _key(request), auth.shown_to_proxy(headers), False
        if not self._token:
            return key, own_key
        if key is not None:
            allowed = auth.may_call(self._token, given, *key) if "rollout_id" in request.match_info else auth.is_trusted(self._token, given)
        else:
            allowed = auth.may_call_outside(self._token, given)
            own_key = not allowed and self._own_keys and bool(given) and not auth.is_ours(given)
            allowed = allowed or own_key
        if not allowed:
            raise RefusedError(_remedy(key), status=401, code="wrong_key")
        return key, own_key


class _Called(NamedTuple):
    """What the path of an attempt's call names."""

    key: Key
    dialect: Dialect
    route: str


class _Closed(NamedTuple):
    """The count of one proxy process for an attempt."""

    marker: str
    spans: int
    dropped: int
    before: bool = False
    """Whether it is the count of an earlier process, which died."""


def _remedy(key: Key | None) -> str:
    if key is not None:
        return f"this is not the key of attempt {key[1]} of rollout {key[0]}: use the OPENAI_API_KEY that the runner gives"
    return (
        "a call of no attempt needs the stack's token (AGL_TOKEN), one of `agl-otel token --for models`, or a shared key; an attempt's own "
        "key opens its own path only: the OPENAI_BASE_URL that the runner gives"
    )


async def _object(request: web.Request) -> Json:
    raw = await body_of(request)
    body = parse_object(raw) if raw else {}
    if body is None:
        raise UsageError(f"the body of {request.path} must be a JSON object")
    return body


def _path_key(request: web.Request) -> Key | None:
    rollout_id, attempt_id = request.match_info.get("rollout_id"), request.match_info.get("attempt_id")
    if rollout_id is None or attempt_id is None:
        return None
    for name, value in (("rollout id", rollout_id), ("attempt id", attempt_id)):
        if not conventions.is_valid_id(value):
            raise InvalidIdError(f"{name} {value[:140]!r} in the path is not allowed: use 1 to 128 of the characters A-Z a-z 0-9 . _ : -")
    return rollout_id, attempt_id


def _key(request: web.Request) -> Key | None:
    key = _path_key(request)
    if key is None and "baggage" in request.headers:
        key = key_of(W3CBaggagePropagator().extract({"baggage": request.headers["baggage"]}, Context()))
    return key


def _called(path: str) -> _Called | None:
    """Return what a path names that is an attempt's call beyond doubt; None for any other."""
    return _short_called(path) if len(path) <= _LONGEST_PATH else None


@lru_cache(maxsize=4096)
def _short_called(path: str) -> _Called | None:
    found = _ATTEMPTS_CALL.fullmatch(path)
    if found is None or not all(map(conventions.is_valid_id, found.group(1, 2))):
        return None
    return _Called((found[1], found[2]), DIALECTS[found[4]], f"{SCOPE}{found[3]}/{found[4]}")


def _crashed() -> web.Response:
    return error_response(500, "the proxy failed: its log has the error", "crashed")


def _answer_to(error: AglError | RecursionError) -> web.Response:
    if isinstance(error, RecursionError):
        return error_response(400, "the body is nested too deeply", "nested")
    if isinstance(error, RefusedError):
        retry = {"Retry-After": str(error.retry_seconds)} if error.retry_seconds is not None else None
        return error_response(error.status, str(error), error.code, retry)
    status = errors.http_status(error)
    return error_response(status, str(error), type(error).__name__, {"Retry-After": "1"} if error.retryable else None)
