"""Who makes a call, by its headers: the process, and the conversation. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Final, NamedTuple
from urllib.parse import unquote_plus

from agl_otel.proxy.agent import Headers
from agl_otel_hook import conventions
from agl_otel_hook.context import parse_traceparent

MAX_CONVERSATION: Final = 256  # characters of a conversation's id


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
        if given and (found := given.strip()) and len(found) <= MAX_CONVERSATION and found.isprintable():
            return Conversation(found, named=True)
    parent = parse_traceparent(headers.get("traceparent", ""))
    return Conversation(f"{parent.trace_id:032x}" if parent is not None else secrets.token_hex(16))


def _member(baggage: Iterable[str], name: str) -> str | None:
    """Return the value of a member of W3C baggage headers; None if it is missing."""
    for member in ",".join(baggage).split(","):
        found, _, value = member.partition("=")
        if found.strip() == name:
            return unquote_plus(value.partition(";")[0].strip())  # OpenTelemetry for Python writes a space as +
    return None
