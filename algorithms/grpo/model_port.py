"""Shared by both model servers (server.py, vllm.py): command line, access checks, and errors in OpenAI's format. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from agl_otel.errors import SettingsError, UsageError
from agl_otel.net.auth import BrowserAccess, is_loopback, is_token_itself, names_on
from agl_otel.net.bodies import Bodies, json_of
from agl_otel.net.http_server import browser_access
from agl_otel.net.in_flight import InFlight
from agl_otel.settings import Settings

MAX_BODY_BYTES: Final = 64 << 20
IN_FLIGHT_BYTES: Final = 1 << 30  # as of the proxy, which sends them


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Make the parser with the options common to all model servers."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--model", required=True, help="folder with model and tokenizer")
    parser.add_argument("--weights", help="folder with the initial weights  [default: the model's]")
    parser.add_argument("--version", default="0", help="version of the initial weights")
    parser.add_argument("--port", type=int, default=8000, help="port; 0: a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--name", default="policy", help="name of the model in responses")
    return parser


def access_checks(host: str, key: str = "") -> list[Any]:
    """Make the middlewares that check access to a server on `host`: no cross-site requests, and with a `key` only authorized ones.

    Without a key, the Host header must be an allowed one, as for all other services (net/auth.py). Raises SettingsError.
    """
    if key:
        return [browser_access(BrowserAccess()), _with_key(key)]
    return [browser_access(BrowserAccess(names_on(host, allowed=Settings.load().allowed_hosts)))]


def counted() -> Any:
    """Make the middleware that bounds what is held of bodies; handlers read them by `bodies.body_of`."""
    return Bodies(InFlight(IN_FLIGHT_BYTES, "the model server's bound"), MAX_BODY_BYTES).held


async def json_body(request: web.Request) -> Any:
    """Read the body as JSON. Raises UsageError if it is none."""
    try:
        return await json_of(request)
    except ValueError as error:
        raise UsageError(f"the body is not JSON: {error}") from error


def require_key(host: str, key: str) -> None:
    """Raise SettingsError where a model server would listen beyond loopback without authentication."""
    if not key and not is_loopback(host):
        raise SettingsError(f"the model server would listen on {host} without authentication: give the stack a token (AGL_TOKEN)")


def _with_key(key: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if is_token_itself(request.headers.get("Authorization", ""), key):
            return await handler(request)
        return error_response(401, "this model server requires its run's key: call the model through the stack's proxy")

    return check


def error_response(status: int, message: str) -> web.Response:
    """Make an error response in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status=status)
