"""Pass the current span on with model calls, so that the proxy's record of a call is its child.

Instrumentations of HTTP clients do that for all requests. An agent's environment may have none, so this does it for requests by httpx,
which the SDKs of OpenAI, Anthropic and Google use, to the addresses of models that the runner has set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from opentelemetry import propagate
from wrapt import register_post_import_hook, wrap_function_wrapper

from agl_otel_hook.guard import never_raises

ADDRESSES: Final = ("OPENAI_BASE_URL", "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "GOOGLE_GEMINI_BASE_URL")
CLIENTS: Final = ("httpx", "httpx2")


def begin(environ: Mapping[str, str]) -> None:
    """Do so from now on, for the addresses in this environment."""
    addresses = tuple({address for name in ADDRESSES if (address := environ.get(name))})
    for name in CLIENTS if addresses else ():
        register_post_import_hook(partial(_wrap, addresses), name)


@never_raises
def _wrap(addresses: tuple[str, ...], module: Any) -> None:
    def send(wrapped: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _pass_on(addresses, args[0] if args else kwargs["request"])
        return wrapped(*args, **kwargs)

    for name in ("Client.send", "AsyncClient.send"):
        wrap_function_wrapper(module, name, send)


@never_raises
def _pass_on(addresses: tuple[str, ...], request: Any) -> None:
    if str(request.url).startswith(addresses) and "traceparent" not in request.headers:
        propagate.inject(request.headers)
