"""One call, there and back: the agent's bytes to the model server, the server's bytes to the agent, and what was seen to the recorder.

A client that goes away ends the call upstream; a server that is away or silent is a 502 or 504 that names it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from agl_otel import semconv
from agl_otel.errors import UsageError
from agl_otel.instrumentation.context import Key, format_traceparent
from agl_otel.proxy.dialects import Dialect, Prepared, prepare, take_out
from agl_otel.proxy.recorder import Call, Recorder
from agl_otel.proxy.reply import Events, parse_object, payload_of
from agl_otel.proxy.upstream import Upstream, Upstreams

CONNECT_SECONDS: Final = 10.0
SILENCE_SECONDS: Final = 600.0  # the longest that a model server may say nothing: a long prompt behind a full batch
KEEP_ALIVE_SECONDS: Final = 3.0  # shorter than the 5 s after which uvicorn, and so vLLM, closes
_NOT_PASSED: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"),
        *("host", "content-length", "content-encoding", "content-type", "accept-encoding"),
        *("traceparent", "tracestate", "baggage"),
    }
)
"""Headers that belong to one connection, or that this proxy sets itself."""


class Forwarder:
    """Forwards calls. Make it in a running event loop; `close` it."""

    def __init__(self, upstreams: Upstreams, recorder: Recorder, *, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._upstreams = upstreams
        self._recorder = recorder
        self._plain: set[str] = set()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=silence_seconds),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def call(self, request: web.Request, key: Key | None, dialect: Dialect) -> web.StreamResponse:
        """Forward a model call and record it. Raises UsageError, NotFoundError, UnavailableError before anything was forwarded."""
        asked = parse_object(await request.read())
        if asked is None:
            raise UsageError(f"the body of {request.path} must be a JSON object")
        upstream = await self._upstreams.resolve(key[0] if key is not None else None)
        capture = upstream.base_url not in self._plain
        prepared = prepare(dialect, asked, model=upstream.model, sampling=upstream.sampling, capture=capture)
        call = self._recorder.start(key, dialect, {**prepared.body, **asked}, request.headers.get("traceparent"))
        call.model_version = upstream.version
        try:
            return await self._exchange(request, upstream, dialect, prepared, asked, call)
        except (asyncio.CancelledError, ConnectionResetError):
            call.incomplete = call.incomplete or "client_gone"
            raise
        finally:
            self._recorder.finish(call)

    async def get(self, request: web.Request, key: Key | None, path: str) -> web.StreamResponse:
        """Forward a GET as it is; nothing is recorded."""
        upstream = await self._upstreams.resolve(key[0] if key is not None else None)
        try:
            async with self._session.get(f"{upstream.base_url}/{path}", headers=_headers(request, upstream)) as response:
                return web.Response(status=response.status, body=await response.read(), headers=_passed(response))
        except (aiohttp.ClientError, OSError) as error:
            return _failure(error, upstream)

    async def _exchange(
        self, request: web.Request, upstream: Upstream, dialect: Dialect, prepared: Prepared, asked: dict[str, Any], call: Call
    ) -> web.StreamResponse:
        headers = _headers(request, upstream)
        headers["content-type"] = "application/json"
        headers["traceparent"] = format_traceparent(call.span.get_span_context())
        url = f"{upstream.base_url}/{dialect.path}"
        try:
            async with self._session.post(url, data=json.dumps(prepared.body).encode(), headers=headers) as response:
                refused = response.status in (400, 422) and prepared.added and _names_any(await response.read(), prepared.added)
                if not refused:
                    return await self._answer(request, response, prepared.added, call)
            self._plain.add(upstream.base_url)
            plain = prepare(dialect, asked, model=upstream.model, sampling=upstream.sampling, capture=False)
            async with self._session.post(url, data=json.dumps(plain.body).encode(), headers=headers) as response:
                return await self._answer(request, response, plain.added, call)
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, ConnectionResetError) and _is_gone(request):
                raise
            answer = _failure(error, upstream)
            call.status, call.incomplete = answer.status, "upstream_timeout" if answer.status == 504 else "upstream_error"
            return answer

    async def _answer(
        self, request: web.Request, response: aiohttp.ClientResponse, added: frozenset[str], call: Call
    ) -> web.StreamResponse:
        call.status = response.status
        call.model_version = response.headers.get(semconv.HEADER_MODEL_VERSION, call.model_version)
        if response.content_type == "text/event-stream":
            return await self._stream(request, response, added, call)
        body = await response.read()
        payload = parse_object(body)
        if payload is not None:
            call.reply.take(payload)
            if take_out(payload, added):
                body = json.dumps(payload, ensure_ascii=False).encode()
        return web.Response(status=response.status, body=body, headers=_passed(response))

    async def _stream(
        self, request: web.Request, response: aiohttp.ClientResponse, added: frozenset[str], call: Call
    ) -> web.StreamResponse:
        out = web.StreamResponse(status=response.status, headers=_passed(response))
        await out.prepare(request)
        events = Events()
        while True:
            try:
                piece = await response.content.readany()
            except (aiohttp.ClientError, OSError):
                call.incomplete = "upstream_error"
                return _broken_off(request, out)
            ready = b"".join([_pass(event, added, call) for event in (events.feed(piece) if piece else [events.rest()])])
            if ready:
                await out.write(ready)
            if not piece:
                break
        if not all(choice.finish_reason for choice in call.reply.choices.values()):
            call.incomplete = "upstream_ended_early"
        await out.write_eof()
        return out


def _pass(event: bytes, added: frozenset[str], call: Call) -> bytes:
    """Record an event; it as the agent shall see it."""
    payload = payload_of(event)
    if payload is None:
        return event
    call.reply.take(payload)
    return b"data: " + json.dumps(payload, ensure_ascii=False).encode() + b"\n\n" if take_out(payload, added) else event


def _broken_off(request: web.Request, out: web.StreamResponse) -> web.StreamResponse:
    """End the agent's connection without the end of the body, so that its client sees that something is missing."""
    if request.transport is not None:
        request.transport.close()
    return out


def _is_gone(request: web.Request) -> bool:
    return request.transport is None or request.transport.is_closing()


def _headers(request: web.Request, upstream: Upstream) -> CIMultiDict[str]:
    headers = CIMultiDict((name, value) for name, value in request.headers.items() if name.lower() not in _NOT_PASSED)
    headers["accept-encoding"] = "identity"  # bytes that can be read here
    if upstream.api_key is not None:
        headers.popall("authorization", None)
        if upstream.api_key:
            headers["authorization"] = f"Bearer {upstream.api_key}"
    return headers


def _passed(response: aiohttp.ClientResponse) -> Mapping[str, str]:
    headers = CIMultiDict((name, value) for name, value in response.headers.items() if name.lower() not in _NOT_PASSED)
    if "content-type" in response.headers:
        headers["content-type"] = response.headers["content-type"]
    return headers


def _names_any(body: bytes, fields: frozenset[str]) -> bool:
    return any(name.encode() in body for name in fields)


def _failure(error: Exception, upstream: Upstream) -> web.Response:
    if isinstance(error, TimeoutError):
        return error_response(504, f"the model server {upstream.base_url} did not answer in time", "timeout")
    return error_response(502, f"the model server {upstream.base_url} cannot be reached or broke off: {error!r}", "upstream_error")


def error_response(status: int, message: str, code: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error in the shape that OpenAI's clients show."""
    return web.json_response(
        {"error": {"message": message, "type": "agl_otel_proxy", "param": None, "code": code}}, status=status, headers=headers
    )
