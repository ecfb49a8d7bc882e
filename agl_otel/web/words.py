"""Errors under /v1 in one shape: JSON with a `detail`, whoever found what is wrong."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

RELAYED: Final = web.RequestKey("relayed", bool)
"""Set on a request that another service has answered, whose words are passed on as they are."""
_ROOT: Final = "/v1/"
_OF_A_BODY: Final = frozenset({"Content-Type", "Content-Length"})
_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def worded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer refusals (no such path, another method, a body that is too large, a page of another site …) as JSON."""
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
async def crashes(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log what a handler failed with, and answer 500 as JSON."""
    if not request.path.startswith(_ROOT):
        return await handler(request)
    try:
        return await handler(request)
    except (web.HTTPException, ConnectionError):
        raise
    except Exception as error:
        if request.transport is None:
            raise
        _log.exception("%s %s failed", request.method, request.path)
        return web.json_response({"detail": f"the service failed ({type(error).__name__}): its log says where"}, status=500)


def _refusal(answer: web.Response, detail: str) -> web.Response:
    kept = [(name, value) for name, value in answer.headers.items() if name not in _OF_A_BODY]
    return web.json_response({"detail": detail}, status=answer.status, headers=kept)


def _detail(request: web.Request, error: web.HTTPError) -> str:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return f"{request.path} takes {', '.join(sorted(error.allowed_methods))}, not {request.method}"
    if isinstance(error, web.HTTPNotFound) and request.match_info.route.resource is None:
        return f"nothing is served at {request.path}: /v1/agl/openapi.json names all paths"
    return (error.text or error.reason).strip()
