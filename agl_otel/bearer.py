"""Whether a request shows the stack's token, for ports of gRPC and HTTP."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio


def shows(authorization: str | bytes, *tokens: str) -> bool:
    """Whether this Authorization header is that of one of `tokens`. A wrong one takes as long as one that is almost right."""
    given = authorization.encode(errors="replace") if isinstance(authorization, str) else authorization
    return any(hmac.compare_digest(given, f"Bearer {token}".encode()) for token in tokens)


class TokenCheck(grpc.aio.ServerInterceptor):  # pyright: ignore[reportMissingTypeArgument] - generic in the stubs only
    """Refuses calls without `authorization: Bearer <token>`, with `words`."""

    def __init__(self, token: str, words: str) -> None:
        self._token = token

        async def refuse(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, words)

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    @classmethod
    def of(cls, token: str, words: str) -> list[TokenCheck]:
        """The interceptors of a server: none where there is no token."""
        return [cls(token, words)] if token else []

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """See grpc.aio.ServerInterceptor."""
        given = next((value for key, value in handler_call_details.invocation_metadata if key == "authorization"), "")
        return await continuation(handler_call_details) if shows(given, self._token) else self._refusal
