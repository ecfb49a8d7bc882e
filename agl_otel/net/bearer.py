"""Whether a request shows the stack's token, for ports of gRPC and HTTP."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import grpc
import grpc.aio

from agl_otel.net.scoped import refusal


def shows(authorization: str | bytes, *tokens: str) -> bool:
    """Whether this Authorization header is that of one of `tokens`. A wrong one takes as long as one that is almost right."""
    given = authorization.encode(errors="replace") if isinstance(authorization, str) else authorization
    return any(hmac.compare_digest(given, f"Bearer {token}".encode()) for token in tokens)


def bearer_refusal(authorization: str | bytes, token: str, *scopes: str) -> str | None:
    """As scoped.refusal, for an Authorization header."""
    given = authorization.decode(errors="replace") if isinstance(authorization, bytes) else authorization
    return refusal(token, given.removeprefix("Bearer "), *scopes)


def given_in(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | bytes:
    """The authorization in the metadata of a call: of several the first, as with headers over HTTP."""
    return next((value for key, value in metadata or () if key == "authorization"), "")


class TokenCheck(grpc.aio.ServerInterceptor):  # pyright: ignore[reportMissingTypeArgument] - generic in the stubs only
    """Refuses calls without `authorization: Bearer <token>`, with `words`; a token for one of `scopes` is taken, too."""

    def __init__(self, token: str, words: str, scopes: Sequence[str]) -> None:
        self._token = token
        self._words = words
        self._scopes = scopes

    @classmethod
    def of(cls, token: str, words: str, *scopes: str) -> list[TokenCheck]:
        """The interceptors of a server: none where there is no token."""
        return [cls(token, words, scopes)] if token else []

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """See grpc.aio.ServerInterceptor."""
        why = bearer_refusal(given_in(handler_call_details.invocation_metadata), self._token, *self._scopes)
        return await continuation(handler_call_details) if why is None else _refusing(why or self._words)


def _refusing(words: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

    return grpc.unary_unary_rpc_method_handler(refuse)
