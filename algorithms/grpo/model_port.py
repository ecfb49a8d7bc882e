"""What our model server and the one over vLLM share: the command line, who may ask, and errors in OpenAI's form. Needs no torch."""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from agl_otel.errors import SettingsError
from agl_otel.net.auth import Visitors, is_loopback, names_on, shows
from agl_otel.net.http_server import own_visitors
from agl_otel.settings import Settings

MAX_BODY_BYTES: Final = 64 << 20


def parser_of(module: str, description: str) -> argparse.ArgumentParser:
    """The options that every model server has; its own are added to them."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--model", required=True, help="folder with model and tokenizer")
    parser.add_argument("--weights", help="folder with the weights to begin with  [default: the model's]")
    parser.add_argument("--version", default="0", help="of the weights to begin with")
    parser.add_argument("--port", type=int, default=8000, help="0: a free one")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--name", default="policy", help="the model's name in answers")
    return parser


def checks(host: str, key: str = "") -> list[Any]:
    """Middlewares that decide who may ask a server on `host`: no page of another site, and with a `key` only who shows it.

    Without a key requests on loopback name it as those to all other services do (net/auth.py). Raises SettingsError.
    """
    if key:
        return [own_visitors(Visitors()), _with_key(key)]
    return [own_visitors(Visitors(names_on(host, allowed=Settings.load().allowed_hosts)))]


def require_key(host: str, key: str) -> None:
    """Raise SettingsError where a model server would listen beyond loopback for everybody."""
    if not key and not is_loopback(host):
        raise SettingsError(f"the model server would listen on {host} for everybody who reaches it: give the stack a token (AGL_TOKEN)")


def _with_key(key: str) -> Any:
    @web.middleware
    async def check(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if shows(request.headers.get("Authorization", ""), key):
            return await handler(request)
        return error_response(401, "this model server wants its run's key: ask the model through the stack's proxy")

    return check


def error_response(status: int, message: str) -> web.Response:
    """An error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": None}}, status=status)
