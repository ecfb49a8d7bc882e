"""OTLP over HTTP, protobuf and JSON, compressed or not; also /health, /status, /metrics and /barrier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any, Final, cast

from aiohttp import web

from agl_otel.collector import otlpjson
from agl_otel.collector.intake import metadata_in
from agl_otel.collector.receive import RETRY_SECONDS, Receiver, status_of
from agl_otel.collector.refusals import Reason
from agl_otel.collector.resends import Outcome
from agl_otel.collector.signals import PROTOCOLS, Protocol
from agl_otel.collector.write import PATIENCE_WITHOUT_STORE_SECONDS
from agl_otel.errors import AglError, TooLargeError, UnavailableError, http_status
from agl_otel.net.auth import NO_CERTIFICATE, Admission, BrowserAccess, admission, is_admitted_anywhere
from agl_otel.net.bodies import BODY_SECONDS, Bodies, json_of
from agl_otel.net.front import Client, SmallRequest, response
from agl_otel.net.http_server import FRONT, Handler, browser_access, peer_has_certificate, readable
from agl_otel.net.in_flight import InFlight
from agl_otel_hook.conventions import HEADER_ACK

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
_PROTOBUF: Final = {"Content-Type": PROTOBUF}
OPEN: Final = frozenset({"/health"})
"""Paths that need neither token nor client certificate."""
_PROTOCOLS: Final = {protocol.path: protocol for protocol in PROTOCOLS}
_ADMISSION: Final = web.RequestKey("admission", Admission)
_ERROR: Final = web.RequestKey("error", AglError)
_REASONS: Final[dict[int, Reason]] = {401: "unauthorized", 403: "forbidden", 404: "unknown_path", 405: "unknown_path"}
_OTLP_REASONS: Final[dict[int, Reason]] = {**_REASONS, 400: "malformed", 415: "content_type"}
"""Of responses that no error has made: {status: reason}, of all paths and of OTLP's."""


class HttpPort:
    """The application of the OTLP HTTP port.

    Args:
        receiver: takes the requests.
        in_flight: bounds the bodies that are read but not yet on disk.
        health: returns the response to GET /health.
        pages: more GET paths, {path: answer}.
        actions: more POST paths, {path: handler}; like all paths but /health they need the token.
        client_certificate: whether clients must present one.
        names: see `auth.BrowserAccess`.
        grpc_at: the address of OTLP over gRPC, for clients that take this port for it.
        body_seconds: time limit for receiving a body.
    """

    def __init__(
        self,
        receiver: Receiver,
        in_flight: InFlight,
        health: Callable[[], dict[str, Any]],
        pages: dict[str, Callable[[], web.Response]] | None = None,
        actions: Mapping[str, Handler] | None = None,
        *,
        client_certificate: bool = False,
        names: Collection[str] | None = None,
        grpc_at: str = "another port",
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._receiver = receiver
        self._bodies = Bodies(in_flight, receiver.max_message_bytes, seconds=body_seconds)
        self._health = health
        self._pages = pages or {}
        self._actions = actions or {}
        self._client_certificate = client_certificate
        self._visitors = BrowserAccess(names)
        self._grpc_at = grpc_at

    def app(self) -> web.Application:
        """Build the aiohttp application."""
        app = web.Application(middlewares=[self._counted, browser_access(self._visitors), readable, self._errors, self._bodies.held])
        if not self._client_certificate:
            app[FRONT] = (_PROTOCOLS.__contains__, self._take, self._refuse_http2)
        for protocol in PROTOCOLS:
            app.router.add_post(protocol.path, self._export(protocol))
        app.router.add_get("/health", self._get_health)
        app.router.add_post("/barrier", self._post_barrier)
        for path, page in self._pages.items():
            app.router.add_get(path, _page(page))
        for path, action in self._actions.items():
            app.router.add_post(path, action)
        return app

    def _take(self, request: SmallRequest, client: Client) -> bool:
        """Take a request in protobuf that may come in (front.py); others, and those that wait for the store, take the way of `_export`."""
        path, headers, body = request
        if len(body) > self._receiver.max_message_bytes:
            return False
        if headers.get("content-type") != PROTOBUF or HEADER_ACK in headers or self._visitors.refusal("POST", {"Host": headers["host"]}):
            return False
        admitted = admission(self._receiver.token, headers.get("authorization", ""), sending=True)
        if admitted.refusal is not None:
            return False
        protocol = _PROTOCOLS[path]
        try:
            self._receiver.check(protocol)
            outcome = self._receiver.intake.begin(protocol.signal, body, metadata_in(headers), admitted.sender)
        except AglError as error:
            client.reply(self._refused(error))
            return True
        if isinstance(outcome, Outcome):
            client.reply(_answered(protocol, outcome))
        else:
            outcome.outcome().add_done_callback(partial(self._reply_later, protocol, client))
        return True

    def _refuse_http2(self) -> str:
        text = f"this is the port of OTLP over HTTP; gRPC is at {self._grpc_at} (AGL_OTLP_GRPC_PORT)"
        self._receiver.refusals.add("http", "other_protocol", text)
        return text

    def _reply_later(self, protocol: Protocol, client: Client, future: asyncio.Future[Outcome]) -> None:
        error = future.exception()
        if error is not None and not isinstance(error, AglError):
            client.reply(response("500 Internal Server Error", b"", "Connection: close"))
            raise error
        client.reply(_answered(protocol, future.result()) if error is None else self._refused(error))

    def _refused(self, error: AglError) -> bytes:
        """Count a refusal of the front, and build its response."""
        self._receiver.refusals.add_error("http", error)
        code = http_status(error)
        headers = (f"Content-Type: {PROTOBUF}", *(f"{name}: {value}" for name, value in _retry_after(error).items()))
        return response(f"{code} {HTTPStatus(code).phrase}", status_of(error).SerializeToString(), *headers)

    def _export(self, protocol: Protocol) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            self._receiver.check(protocol)
            if request.content_type not in (PROTOBUF, JSON):
                given = f"not {request.content_type}" if "Content-Type" in request.headers else "and the request has none"
                text = f"{request.path} takes Content-Type {PROTOBUF} or {JSON}, {given}"
                return web.Response(status=415, text=text + "; set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf\n")
            raw = await self._read(request, protocol)
            outcome = await self._receiver.intake.take(protocol.signal, raw, metadata_in(request.headers), request[_ADMISSION].sender)
            answer = protocol.answer(outcome)
            if request.content_type == JSON:
                return web.Response(body=otlpjson.to_json(answer), content_type=JSON)
            return web.Response(body=answer.SerializeToString(), headers=_PROTOBUF)

        return handle

    async def _read(self, request: web.Request, protocol: Protocol) -> bytes:
        """Read the request as protobuf bytes. The body counts as in flight here only while it arrives; then the intake counts it."""
        convert = partial(otlpjson.to_protobuf, protocol.request) if request.content_type == JSON else None
        try:
            if convert is None and (body := self._bodies.whole(request)) is not None:  # the usual case
                return body
            with self._bodies.in_flight.growing() as hold:
                return await self._bodies.read(request, hold, convert=convert)
        except TooLargeError as error:
            raise TooLargeError(f"{error} (AGL_MAX_MESSAGE_BYTES)") from None

    async def _get_health(self, request: web.Request) -> web.Response:
        """Return whether the collector is healthy; details need the token, if there is one."""
        health = self._health()
        known = self._admission(request, "metrics").refusal is None
        return web.json_response(health if known else {"status": health["status"]})

    async def _post_barrier(self, request: web.Request) -> web.Response:
        """Wait for the barrier.

        The body may have `patience_seconds`, after which the wait ends if nothing can be stored, and `rollouts`, a list of ids whose dead
        letters are removed.
        """
        body: Any = None
        if request.can_read_body:
            with contextlib.suppress(ValueError):
                body = await json_of(request)
        asked = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        position = await self._receiver.writer.barrier(_patience(asked.get("patience_seconds")))
        try:
            await self._receiver.writer.forget(_texts(asked.get("rollouts")))
        except OSError as error:
            raise UnavailableError(f"dead letters cannot be removed: {error.strerror or error}; ask again") from None
        return web.json_response({"position": position})

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: count refused requests."""
        answer = await handler(request)
        if (error := request.get(_ERROR)) is not None:
            self._receiver.refusals.add_error("http", error)
        elif reason := (_OTLP_REASONS if request.path in _PROTOCOLS else _REASONS).get(answer.status):
            self._receiver.refusals.add("http", reason, (answer.text if isinstance(answer, web.Response) else None) or "")
        return answer

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: admit the caller, and answer errors with a google.rpc.Status."""
        if request.path not in OPEN and (refusal := self._not_allowed(request)):
            return refusal
        try:
            return await handler(request)
        except AglError as error:
            request[_ERROR] = error
            return _refusal(request, error)
        except web.HTTPNotFound:
            return web.Response(status=404, text=f"this port has no {request.path}{_remedy(request.path)}; it has {self._paths(request)}\n")
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            text = f"{request.path} takes {allowed}, not {request.method}\n"
            return web.Response(status=405, text=text, headers={"Allow": allowed})

    def _not_allowed(self, request: web.Request) -> web.Response | None:
        if self._client_certificate and not peer_has_certificate(request.transport):
            return web.Response(status=401, text=NO_CERTIFICATE + "\n")
        scopes = ("metrics",) if request.path == "/metrics" else ()
        request[_ADMISSION] = found = self._admission(request, *scopes, sending=request.path in _PROTOCOLS)
        if found.refusal is not None:
            if isinstance(request.match_info.http_exception, web.HTTPNotFound) and is_admitted_anywhere(*self._shown(request)):
                return None  # the handler answers that there is no such path
            return web.Response(status=401, text=found.refusal + "\n", headers={"WWW-Authenticate": "Bearer"})
        return None

    def _admission(self, request: web.Request, *scopes: str, sending: bool = False) -> Admission:
        return admission(*self._shown(request), *scopes, sending=sending)

    def _shown(self, request: web.Request) -> tuple[str, str]:
        return self._receiver.token, request.headers.get("Authorization", "")

    def _paths(self, request: web.Request) -> str:
        found = {f"{route.method} {route.resource.canonical}" for route in request.app.router.routes() if route.resource}
        return ", ".join(sorted(name for name in found if not name.startswith("HEAD ")))


def _remedy(path: str) -> str:
    """Return the remedy for a path that has one of OTLP's twice: the endpoint that the SDK was given had it already; else nothing."""
    twice = next((each.path for each in PROTOCOLS if path.startswith(f"{each.path}/v1/")), "")
    return f": set OTEL_EXPORTER_OTLP_ENDPOINT without {twice}, which SDKs add" if twice else ""


def _texts(values: Any) -> list[str]:
    return [each for each in cast("list[Any]", values) if isinstance(each, str)] if isinstance(values, list) else []


def _patience(value: Any) -> float:
    valid = isinstance(value, int | float) and 0 <= value < PATIENCE_WITHOUT_STORE_SECONDS * 10
    return float(value) if valid else PATIENCE_WITHOUT_STORE_SECONDS


def _answered(protocol: Protocol, outcome: Outcome) -> bytes:
    return response("200 OK", protocol.answer(outcome).SerializeToString(), f"Content-Type: {PROTOBUF}")


def _retry_after(error: AglError) -> dict[str, str]:
    return {"Retry-After": str(RETRY_SECONDS)} if isinstance(error, UnavailableError) else {}


def _page(page: Callable[[], web.Response]) -> Handler:
    async def get(_: web.Request) -> web.Response:
        return page()

    return get


def _refusal(request: web.Request, error: AglError) -> web.Response:
    """Make the error response: a google.rpc.Status in the encoding of the request, or text for other requests."""
    code, status, headers = http_status(error), status_of(error), _retry_after(error)
    if not request.path.startswith("/v1/"):
        return web.Response(status=code, text=status.message + "\n", headers=headers)
    if request.content_type == JSON:
        return web.Response(status=code, body=otlpjson.to_json(status), content_type=JSON, headers=headers)
    return web.Response(status=code, body=status.SerializeToString(), content_type=PROTOBUF, headers=headers)
