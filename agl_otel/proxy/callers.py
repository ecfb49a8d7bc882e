"""Who makes a call, by its headers: the process, the conversation, and whether it is a retry."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from hashlib import blake2b
from typing import Final, NamedTuple
from urllib.parse import unquote_plus

from agl_otel.proxy.agent import Headers
from agl_otel.proxy.canary import conversation_id
from agl_otel.spans.tolerant import whole_of
from agl_otel_hook import conventions
from agl_otel_hook.context import parse_traceparent

_RETRY_HEADERS: Final = ("x-stainless-retry-count", "x-retry-count")


class Conversation(NamedTuple):
    """The conversation that a call of no rollout is a part of."""

    id: str
    named: bool = False
    """Whether the caller gave the id as one of a conversation."""


def caller_of(baggage: Iterable[str]) -> str | None:
    """Return the marker of the calling process from its W3C baggage headers; None if it is missing or invalid."""
    marker = _member(baggage, conventions.PROCESS)
    return marker if marker is not None and conventions.is_valid_id(marker) else None


def conversation_of(headers: Headers) -> Conversation:
    """Return the conversation: by baggage, else by its header, else the trace, else this call alone.

    An id that is too long, or has characters that do not print, is none.
    """
    for given in (_member(headers.getall("baggage", ()), conventions.CONVERSATION_ID), headers.get(conventions.HEADER_CONVERSATION_ID)):
        if given and (found := conversation_id(given)):
            return Conversation(found, named=True)
    parent = parse_traceparent(headers.get("traceparent", ""))
    return Conversation(f"{parent.trace_id:032x}" if parent is not None else secrets.token_hex(16))


def retry_of(headers: Headers, raw: bytes) -> tuple[int, bytes]:
    """Return the client's retry count (0: the first try) and the request's fingerprint, which all its tries share."""
    number = next((whole_of(headers[name]) for name in _RETRY_HEADERS if name in headers), 0)
    idempotency = headers.get("idempotency-key")
    digest = blake2b(idempotency.encode() if idempotency else raw, digest_size=16).digest()
    return max(0, number), digest


def _member(baggage: Iterable[str], name: str) -> str | None:
    """Return the value of a member of W3C baggage headers; None if it is missing."""
    for member in ",".join(baggage).split(","):
        found, _, value = member.partition("=")
        if found.strip() == name:
            return unquote_plus(value.partition(";")[0].strip())  # OpenTelemetry for Python writes a space as +
    return None
