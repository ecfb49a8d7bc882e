"""The key with which agents send telemetry: it opens the collectors' OTLP ports and nothing else. Pure.

Agents run what a model wrote; the stack's token, which reads and deletes everything, is not for them. The key is made from the token, so
that collectors (the Go one, too: agentlightningextension/token.go) know it without being told; the token cannot be found from it.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

PREFIX: Final = "agl-"
PURPOSE: Final = b"otlp"
LENGTH: Final = 40  # hexadecimal digits


def ingest_key(token: str) -> str:
    """The key of a stack with this token; empty where it has none."""
    return PREFIX + hmac.new(token.encode(), PURPOSE, sha256).hexdigest()[:LENGTH] if token else ""
