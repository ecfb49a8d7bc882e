"""What an agent is answered, and what is recorded, if a model server fails. Pure."""

from __future__ import annotations

from aiohttp import web

from agl_otel.proxy.answer import error_response
from agl_otel.proxy.outgoing import REDIRECT, RedirectedError, RefusedAnswerError
from agl_otel.proxy.upstream import Upstream
from agl_otel.text import error_text, without_secrets


def incomplete_of(error: Exception, failure: web.Response) -> str:
    """Return why a call is incomplete that was answered with this failure."""
    if isinstance(error, RefusedAnswerError):
        return error.code
    return "upstream_timeout" if failure.status == 504 else "upstream_error"


def failure_of(error: Exception, upstream: Upstream) -> web.Response:
    """Return the answer to an agent whose model server failed with this error."""
    if isinstance(error, RedirectedError):
        return error_response(502, f"the model server {error}", REDIRECT)
    if isinstance(error, RefusedAnswerError):
        return error_response(502, f"the model server {public_address(upstream)} {error}", error.code)
    if isinstance(error, TimeoutError):
        return error_response(504, f"the model server {public_address(upstream)} did not answer in time", "timeout")
    why = f"cannot be reached or broke off: {error_text(error)}"
    return error_response(502, f"the model server {public_address(upstream)} {why}", "upstream_error")


def public_address(upstream: Upstream) -> str:
    """The upstream's address without credentials, for agents and spans."""
    return without_secrets(upstream.base_url)
