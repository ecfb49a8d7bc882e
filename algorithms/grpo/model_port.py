"""Shared by both model servers (server.py, vllm.py): command line, access checks, POST and GET /weights, errors. Needs no torch.

GET /weights says what a server samples with: {"version", "path": folder whose files these weights are of, or null where the files have
changed since, "adapter_rank": greatest rank of a LoRA adapter that POST /weights takes, 0 for none, "sleeps": whether there are
POST /sleep, which frees the GPU's memory, and POST /wake}.
"""

from __future__ import annotations

import argparse
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from agl_otel.algorithms.model_files import WEIGHTS_FILE
from agl_otel.errors import SettingsError, UsageError
from agl_otel.net.auth import BrowserAccess, is_loopback, is_token_itself, names_on
from agl_otel.net.bodies import Bodies, json_of
from agl_otel.net.http_server import browser_access
from agl_otel.net.in_flight import InFlight
from agl_otel.settings import Settings

MAX_BODY_BYTES: Final = 64 << 20
ANSWERING: Final = "answering"
"""The key of GET /health: how many calls are being answered."""
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


@dataclass
class Calls:
    """The calls under way, which count_calls counts."""

    now: int = 0


CALLS: Final = web.AppKey("calls", Calls)


@web.middleware
async def count_calls(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
    """Count a call of the model in the application's CALLS while it is answered."""
    if not request.path.startswith("/v1/"):
        return await handler(request)
    calls = request.app[CALLS]
    calls.now += 1
    try:
        return await handler(request)
    finally:
        calls.now -= 1


async def json_body(request: web.Request) -> Any:
    """Read the body as JSON. Raises UsageError if it is none, or nested too deeply to read."""
    try:
        return await json_of(request)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON that can be read: {error}") from error


async def weights_wanted(request: web.Request) -> tuple[Path, str]:
    """Read the body of POST /weights: (folder, version). Raises UsageError."""
    body = await json_body(request)
    if not isinstance(body, dict) or not isinstance(body.get("path"), str) or not isinstance(body.get("version"), (str, int)):
        raise UsageError(f'POST /weights takes {{"path": folder with {WEIGHTS_FILE}, "version": string or integer}}')
    return Path(body["path"]), str(body["version"])


class Origin:
    """The folder that a server's weights were read from, and its files as they were then. Reads their names, sizes and times only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._files = _files_of(self._folder)

    @property
    def path(self) -> str | None:
        """The folder; None where its files have changed since, or are gone."""
        return str(self._folder) if self._files and _files_of(self._folder) == self._files else None

    def is_still(self, folder: Path) -> bool:
        """Return whether the weights are those that `folder` holds now."""
        return self.path == str(folder.resolve())


def _files_of(folder: Path) -> list[tuple[str, int, int]]:
    try:
        found = [(path.name, path.stat()) for path in folder.glob("*.safetensors")]
    except OSError:
        return []
    return sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found)


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
    return web.json_response(error_body(status, message), status=status)


def error_body(status: int, message: str) -> dict[str, Any]:
    """Return the body of an error response, or the event of a stream that fails, in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}
