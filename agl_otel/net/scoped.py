"""Tokens that open some services for a while: made from the stack's token, so that nobody keeps a list of them. Pure but for the clock.

For people and programs that look: a browser, Grafana, Prometheus. Runners and trainers need the stack's token itself, from which they
make the keys of their agents (ingest.py, proxy/keys.py). The stack's token cannot be found from one of these. One that got out is void
when its time is over, or when the stack has another token.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from agl_otel.errors import UsageError

SCOPES: Final = {
    "queue": "the queue's gRPC",
    "collector": "the collector's ports: sends, deletes, maintains",
    "clickhouse": "read-only SQL",
    "proxy": "model calls of no attempt, and what steers the proxy",
    "web": "REST, dashboard, Jaeger's APIs",
    "view": "the same as far as it changes nothing: the whole dashboard",
    "metrics": "/metrics of every service, and nothing else",
}
"""{name: what it opens}."""
NO_TOKEN: Final = "no token was made, because the stack has none: set AGL_TOKEN to it"
PREFIX: Final = "aglt"
LENGTH: Final = 40  # hexadecimal digits


def scoped_token(token: str, scopes: Sequence[str], expires_at: float) -> str:
    """A token for these services until then (Unix seconds). Raises UsageError where there is no token or no such service."""
    if not token:
        raise UsageError(NO_TOKEN)
    unknown = sorted({*scopes} - {*SCOPES})
    if unknown or not scopes:
        what = f"there is no service {', '.join(unknown)}" if scopes else "it opens nothing"
        raise UsageError(f"no token was made: {what}; name some of {', '.join(SCOPES)}")
    body = f"{PREFIX}-{'+'.join(sorted({*scopes}))}-{int(expires_at)}"
    return f"{body}-{_signature(token, body)}"


def refusal(token: str, given: str, *scopes: str, now: float | None = None) -> str | None:
    """Why `given` does not open a service of these scopes: empty where it is just not a token of the stack, None where it does."""
    if hmac.compare_digest(given.encode(errors="replace"), token.encode()):
        return None
    body, _, signature = given.rpartition("-")
    if not body.startswith(f"{PREFIX}-") or not hmac.compare_digest(signature.encode(errors="replace"), _signature(token, body).encode()):
        return ""
    _, names, until = body.split("-")
    if (time.time() if now is None else now) >= int(until):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(int(until)))
        return f"this token expired at {when} UTC: ask for another one (`agl-otel token`)"
    if not {*names.split("+")} & {*scopes}:
        return f"this token is for {names.replace('+', ', ')} and not for {scopes[0]}"
    return None


def _signature(token: str, body: str) -> str:
    """Of nothing else that the stack's token signs (proxy/keys.py): no id holds a NUL."""
    return hmac.new(token.encode(), b"scoped\0" + body.encode(errors="replace"), sha256).hexdigest()[:LENGTH]
