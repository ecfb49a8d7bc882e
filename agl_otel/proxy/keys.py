"""Keys that the proxy hands out: one for each attempt, so that no agent can write into another's. Pure.

They are made from the stack's token, and so need no list; a stack without a token asks for none. A process that runs many attempts at
once (function agents, told apart by baggage) has a key for all of them: within one process nothing keeps attempts apart anyway.
"""

from __future__ import annotations

import hmac
from hashlib import sha256
from typing import Final

from agl_otel.net.scoped import PREFIX as SCOPED
from agl_otel.net.scoped import refusal
from agl_otel_hook.conventions import BOUND_PREFIX

PREFIX: Final = "agl-"
"""What our keys start with; a provider's key never does."""
SHARED: Final = "shared"
MODEL_SERVER: Final = "model-server"


def attempt_key(token: str, rollout_id: str, attempt_id: str) -> str:
    """The key of one attempt, for `OPENAI_API_KEY`; the stack's token cannot be found from it."""
    return _made(token, f"{rollout_id}/{attempt_id}")


def shared_key(token: str) -> str:
    """The key of a process that runs many attempts."""
    return _made(token, SHARED)


def model_server_key(token: str) -> str:
    """The key of model servers that a training run starts on a cluster: the proxy shows it. Empty where the stack has no token."""
    return _made(token, MODEL_SERVER) if token else ""


def is_ours(key: str) -> bool:
    """Whether this looks like one of these keys, which no provider may see."""
    return key.startswith((PREFIX, SCOPED, BOUND_PREFIX))


def may_call(token: str, given: str, rollout_id: str, attempt_id: str) -> bool:
    """Whether `given` opens this attempt: its own key, the shared one, or the stack's token itself."""
    fitting = (attempt_key(token, rollout_id, attempt_id), shared_key(token), token)
    return not token or any(hmac.compare_digest(given.encode(errors="replace"), key.encode()) for key in fitting)


def is_trusted(token: str, given: str) -> bool:
    """Whether `given` is the stack's token, one for the proxy, or the shared key."""
    shared = hmac.compare_digest(given.encode(errors="replace"), shared_key(token).encode())
    return not token or shared or refusal(token, given, "proxy") is None


def _made(token: str, what: str) -> str:
    return PREFIX + hmac.new(token.encode(), what.encode(), sha256).hexdigest()[:40]
