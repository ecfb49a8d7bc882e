"""Middlewares that answer every error under /v1 as JSON with a `detail`, whichever layer raised it."""

from __future__ import annotations

import logging
from typing import Final

from aiohttp import web

from agl_otel.net.http_server import Handler

RELAYED: Final = web.RequestKey("relayed", bool)
"""Set on a request that another service answered: its error is returned unchanged."""
_ROOT: Final = "/v1/"
_BODY_HEADERS: Final = frozenset({"Content-Type", "Content-Length"})
_log = logging.getLogger(__name__)


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer HTTP errors (unknown path, wrong method, body too large, foreign origin, …) as JSON."""
    if not request.path.startswith(_ROOT):
        return await handler(request)
    try:
        answer = await handler(request)
    except web.HTTPError as error:
        return _refusal(error, _detail(request, error))
    if isinstance(answer, web.Response) and answer.status >= 400 and answer.content_type == "text/plain" and not request.get(RELAYED):
        return _refusal(answer, (answer.text or "").strip())
    return answer


@web.middleware
async def json_crashes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log an unexpected exception of a handler, and answer 500 as JSON."""
    if not request.path.startswith(_ROOT):
        return await handler(request)
    try:
        return await handler(request)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:  # the last boundary: any defect of a handler
        if request.transport is None:
            raise
        _log.exception("%s %s failed", request.method, request.path)
        return web.json_response({"detail": f"the service failed ({type(error).__name__}): its log says where"}, status=500)


def _refusal(answer: web.Response, detail: str) -> web.Response:
    kept = [(name, value) for name, value in answer.headers.items() if name not in _BODY_HEADERS]
    return web.json_response({"detail": detail}, status=answer.status, headers=kept)


def _detail(request: web.Request, error: web.HTTPError) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} takes {', '.join(sorted(error.allowed_methods))}, not {request.method}"
    if isinstance(error, web.HTTPNotFound) and request.match_info.route.resource is None:
        return f"nothing is served at {request.path}: /v1/agl/openapi.json names all paths"
    return (error.text or error.reason).strip()
