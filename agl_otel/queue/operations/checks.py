"""The values in requests, checked before they are stored: a wrong one would fail every later reader. Pure."""

from __future__ import annotations

import json
from typing import Final, get_args

from agl_otel.errors import UsageError
from agl_otel.queue.proto import queue_pb2 as pb
from agl_otel.types import AttemptStatus, RolloutMode, RolloutStatus

MODES: Final = frozenset(get_args(RolloutMode))
ROLLOUT_STATUSES: Final = frozenset(get_args(RolloutStatus))
ATTEMPT_STATUSES: Final = frozenset(get_args(AttemptStatus))


def checked_json(text: str, what: str) -> str:
    """Return `text` ("null" if empty). Raises UsageError if it is not JSON: once stored, it would fail every later reader."""
    try:
        json.loads(text or "null")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the {what} is no JSON: {error}") from None
    return text or "null"


def checked_object(text: str, what: str) -> str:
    """Return `text`. Raises UsageError if it is neither a JSON object nor null."""
    if not isinstance(json.loads(checked_json(text, what)), dict | None):
        raise UsageError(f"the {what} is no JSON object: {text[:100]}")
    return text


def checked_mode(mode: str) -> str:
    """Return `mode`. Raises UsageError, which lists the valid modes."""
    if mode not in MODES:
        raise UsageError(f"there is no mode {mode!r}: use one of {', '.join(sorted(MODES))}")
    return mode


def checked_config(config: pb.Config) -> tuple[float | None, float | None, int, str]:
    """Return timeout_seconds, unresponsive_seconds, max_attempts, and retry_condition as JSON. Raises UsageError."""
    limits: list[float | None] = []
    for name in ("timeout_seconds", "unresponsive_seconds"):
        value: float | None = getattr(config, name) if config.HasField(name) else None
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be more than 0, not {value:g}")
        limits.append(value)
    if config.max_attempts < 0:
        raise UsageError(f"max_attempts must be at least 1, not {config.max_attempts}")
    unknown = [status for status in config.retry_condition if status not in ATTEMPT_STATUSES]
    if unknown:
        raise UsageError(f"retry_condition names {unknown[0]!r}, which is no attempt status: use {', '.join(sorted(ATTEMPT_STATUSES))}")
    condition = json.dumps(list(config.retry_condition)) if config.retry_condition else "[]"
    return limits[0], limits[1], config.max_attempts or 1, condition


def worker_of(request: pb.ClaimRequest | pb.StartRequest | pb.StartAttemptRequest) -> str | None:
    """Return the worker that a request names."""
    return request.worker_id if request.HasField("worker_id") else None
