"""OTLP over HTTP, protobuf and JSON, compressed or not; beside it /health, /status, /metrics and /barrier.

Only translates between the wire and `Intake`. Bodies are decompressed here and not by aiohttp, so that what they unfold to is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

from aiohttp import web
from google.rpc.status_pb2 import Status

from agl_otel.collector import otlpjson
from agl_otel.collector.compress import EncodingError, TooLargeError, decompress, too_large
from agl_otel.collector.intake import METADATA
from agl_otel.collector.limits import InFlight
from agl_otel.collector.receive import GRPC_NUMBER, METRICS_OFF, RETRY_SECONDS, Receiver, status_of
from agl_otel.collector.signals import PROTOCOLS, Protocol
from agl_otel.errors import AglError, UnavailableError, http_status
from agl_otel.net.auth import NO_CERTIFICATE, Admission, Visitors, admission
from agl_otel.net.http_server import BODY_SECONDS, body_in_time, own_visitors, peer_has_certificate, readable

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
LONG_BYTES: Final = 64 << 10  # bodies from here on are unpacked in a thread
LARGE_BYTES: Final = 1 << 20  # bodies from here on are unpacked apart from the others, which one that is made to take long must not hold up
UNPACKING: Final = 3  # threads for either: each may hold as much as `max_message_bytes`
OPEN: Final = frozenset({"/health"})
"""Paths that ask for neither token nor client certificate."""
_SENDING: Final = frozenset(protocol.path for protocol in PROTOCOLS)
_ADMISSION: Final = web.RequestKey("admission", Admission)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpPort:
    """The application of the OTLP HTTP port.

    Args:
        receiver: takes the requests.
        in_flight: bounds what is read but not yet on disk.
        health: what GET /health answers.
        pages: more GET paths, {path: answer}.
        actions: more POST paths, {path: handler}; they ask for the token as all paths but /health do.
        client_certificate: whether clients must show one.
        names: see `auth.Visitors`.
        body_seconds: how long a body may take to come.
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
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._receiver = receiver
        self._body_seconds = body_seconds
        self._in_flight = in_flight
        self._health = health
        self._pages = pages or {}
        self._actions = actions or {}
        self._client_certificate = client_certificate
        self._visitors = own_visitors(Visitors(names))
        self._unpacking = ThreadPoolExecutor(UNPACKING, thread_name_prefix="unpack")
        self._unpacking_large = ThreadPoolExecutor(UNPACKING, thread_name_prefix="unpack-large")

    def app(self) -> web.Application:
        """The aiohttp application; serve it with `auto_decompress=False`."""
        app = web.Application(client_max_size=self._receiver.max_message_bytes, middlewares=[self._visitors, readable, self._errors()])
        for protocol in PROTOCOLS:
            app.router.add_post(protocol.path, self._export(protocol))
        app.router.add_get("/health", self._get_health)
        app.router.add_post("/barrier", self._post_barrier)
        for path, page in self._pages.items():
            app.router.add_get(path, _page(page))
        for path, action in self._actions.items():
            app.router.add_post(path, _in_time(action))
        app.on_cleanup.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        for threads in (self._unpacking, self._unpacking_large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _export(self, protocol: Protocol) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            if not self._receiver.takes(protocol):
                return _refusal(request, 501, Status(code=GRPC_NUMBER["UNIMPLEMENTED"], message=METRICS_OFF))
            if request.content_type not in (PROTOBUF, JSON):
                text = f"{request.path} takes Content-Type {PROTOBUF} or {JSON}, not {request.content_type}"
                return web.Response(status=415, text=text + "; set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf\n")
            raw = await self._read(request, protocol)
            metadata = {name: request.headers[name] for name in METADATA if name in request.headers}
            outcome = await self._receiver.intake.take(protocol.signal, raw, metadata, request[_ADMISSION].sender)
            answer = protocol.answer(outcome)
            if request.content_type == JSON:
                return web.Response(body=otlpjson.to_json(answer), content_type=JSON)
            return web.Response(body=answer.SerializeToString(), content_type=PROTOBUF)

        return handle

    async def _read(self, request: web.Request, protocol: Protocol) -> bytes:
        """The request as protobuf bytes."""
        limit = self._receiver.max_message_bytes
        if (request.content_length or 0) > limit:
            raise too_large(limit)
        encoding = request.headers.get("Content-Encoding", "")
        is_json = request.content_type == JSON
        with self._in_flight.growing() as hold:
            body = await _body(request, limit, hold, self._body_seconds)

            def unpack() -> bytes:
                plain = decompress(encoding, body, limit, gone=lambda: request.transport is None)
                return otlpjson.to_protobuf(protocol.request, plain) if is_json else plain

            if not is_json and not encoding:
                return body
            if len(body) < LONG_BYTES and not encoding:
                return unpack()
            threads = self._unpacking if len(body) < LARGE_BYTES else self._unpacking_large
            return await asyncio.get_running_loop().run_in_executor(threads, unpack)

    async def _get_health(self, request: web.Request) -> web.Response:
        """Whether it is well; the rest only with the token, where there is one."""
        health = self._health()
        known = self._admission(request, "metrics").refusal is None
        return web.json_response(health if known else {"status": health["status"]})

    async def _post_barrier(self, request: web.Request) -> web.Response:
        """With the body {"rollouts": [ids]}, dead letters of these rollouts are removed, too."""
        body: Any = None
        if request.can_read_body:
            with contextlib.suppress(ValueError, LookupError), body_in_time(request):
                body = await request.json()
        asked = cast("dict[str, Any]", body) if isinstance(body, dict) else {}
        position = await self._receiver.writer.barrier()
        try:
            await self._receiver.writer.forget(_texts(asked.get("rollouts")))
        except OSError as error:
            raise UnavailableError(f"dead letters cannot be removed: {error.strerror or error}; ask again") from None
        return web.json_response({"position": position})

    def _errors(self) -> Any:
        @web.middleware
        async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            if request.path not in OPEN and (refusal := self._not_allowed(request)):
                return refusal
            try:
                return await handler(request)
            except AglError as error:
                headers = {"Retry-After": str(RETRY_SECONDS)} if isinstance(error, UnavailableError) else {}
                return _refusal(request, _status(error), status_of(error), headers)
            except web.HTTPRequestEntityTooLarge:
                error = too_large(self._receiver.max_message_bytes)
                return _refusal(request, 413, status_of(error))
            except web.HTTPNotFound:
                return web.Response(status=404, text=f"this port has no {request.path}; it has {self._paths(request)}\n")
            except web.HTTPMethodNotAllowed as error:
                allowed = ", ".join(sorted(error.allowed_methods))
                text = f"{request.path} takes {allowed}, not {request.method}\n"
                return web.Response(status=405, text=text, headers={"Allow": allowed})

        return errors

    def _not_allowed(self, request: web.Request) -> web.Response | None:
        if self._client_certificate and not peer_has_certificate(request.transport):
            return web.Response(status=401, text=NO_CERTIFICATE + "\n")
        scopes = ("metrics",) if request.path == "/metrics" else ()
        request[_ADMISSION] = found = self._admission(request, *scopes, sending=request.path in _SENDING)
        if found.refusal is not None:
            return web.Response(status=401, text=found.refusal + "\n", headers={"WWW-Authenticate": "Bearer"})
        return None

    def _admission(self, request: web.Request, *scopes: str, sending: bool = False) -> Admission:
        return admission(self._receiver.token, request.headers.get("Authorization", ""), *scopes, sending=sending)

    def _paths(self, request: web.Request) -> str:
        found = {f"{route.method} {route.resource.canonical}" for route in request.app.router.routes() if route.resource}
        return ", ".join(sorted(name for name in found if not name.startswith("HEAD ")))


async def _body(request: web.Request, limit: int, hold: Callable[[int], None], seconds: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.content.iter_any():
                size += len(part)
                if size > limit:
                    raise too_large(limit)
                hold(len(part))
                parts.append(part)
    except TimeoutError:
        raise UnavailableError(f"the body did not come within {seconds:.0f} s ({size} bytes did): send smaller batches") from None
    return b"".join(parts)


def _in_time(action: Handler) -> Handler:
    async def post(request: web.Request) -> web.StreamResponse:
        with body_in_time(request):
            return await action(request)

    return post


def _texts(values: Any) -> list[str]:
    return [each for each in cast("list[Any]", values) if isinstance(each, str)] if isinstance(values, list) else []


def _page(page: Callable[[], web.Response]) -> Handler:
    async def get(_: web.Request) -> web.Response:
        return page()

    return get


def _status(error: AglError) -> int:
    return 413 if isinstance(error, TooLargeError) else 415 if isinstance(error, EncodingError) else http_status(error)


def _refusal(request: web.Request, code: int, status: Status, headers: dict[str, str] | None = None) -> web.Response:
    """A google.rpc.Status in the encoding of the request; text where it is no OTLP request."""
    if not request.path.startswith("/v1/"):
        return web.Response(status=code, text=status.message + "\n", headers=headers)
    if request.content_type == JSON:
        return web.Response(status=code, body=otlpjson.to_json(status), content_type=JSON, headers=headers)
    return web.Response(status=code, body=status.SerializeToString(), content_type=PROTOBUF, headers=headers)
