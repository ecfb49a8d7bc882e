"""The keys with which agents send telemetry: they open the collectors' OTLP ports and nothing else. Pure.

Agents run what a model wrote; the stack's token, which reads and deletes everything, is not for them. Keys are made from the token, so
that collectors (the Go one, too: collector/otelcol/agentlightning) know them without being told; the token cannot be found from them.

An agent that is started for one attempt gets that attempt's key: what it sends is that attempt's, whatever it says. A service that many
attempts share gets each one's with its request (the hook's given.py). The key that is bound to none may send for every rollout; it is
for services that cannot do that (`agl-otel token --for otlp`). collector/conformance/keys has golden vectors.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final, NamedTuple

from agl_otel_hook.conventions import BOUND_PREFIX, named_by

PREFIX: Final = "agl-"
PURPOSE: Final = "otlp"
LENGTH: Final = 40  # hexadecimal digits


class Sender(NamedTuple):
    """Who sends telemetry, by the key that was shown; as it stands the stack's token, or anybody where there is none."""

    is_agent: bool = False
    bound: tuple[str, str] | None = None
    """(rollout, attempt) of an agent's key that is bound to one."""


TRUSTED: Final = Sender()


def sender_of(token: str, key: str) -> Sender:
    """Who shows this key to a collector whose stack has this token."""
    bound = attempt_of(token, key)
    if bound is not None:
        return Sender(is_agent=True, bound=bound)
    return Sender(is_agent=bool(token) and hmac.compare_digest(key.encode(errors="replace"), ingest_key(token).encode()))


def ingest_key(token: str) -> str:
    """The key of a stack with this token that is bound to no attempt; empty where it has none."""
    return PREFIX + _signature(token, PURPOSE) if token else ""


def attempt_ingest_key(token: str, rollout_id: str, attempt_id: str) -> str:
    """The key of one attempt; empty where the stack has no token."""
    named = f"{rollout_id}/{attempt_id}"
    return f"{BOUND_PREFIX}{named}-{_signature(token, PURPOSE, named)}" if token else ""


def attempt_of(token: str, key: str) -> tuple[str, str] | None:
    """(rollout, attempt) of an attempt's key of a stack with this token; None of any other text."""
    named = named_by(key)
    if not token or named is None:
        return None
    return named if hmac.compare_digest(key.encode(errors="replace"), attempt_ingest_key(token, *named).encode()) else None


def _signature(token: str, *parts: str) -> str:
    """Of the parts with NULs between them, which no id holds."""
    return hmac.new(token.encode(), "\0".join(parts).encode(), sha256).hexdigest()[:LENGTH]
