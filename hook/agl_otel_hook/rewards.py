"""The last primary reward of each attempt that this process has emitted, for a runner to display."""

from __future__ import annotations

from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from agl_otel_hook import conventions
from agl_otel_hook.context import Key
from agl_otel_hook.guard import never_raises
from agl_otel_hook.processor import key_of_attributes

MAX_ATTEMPTS: Final = 10_000  # attempts that are not forgotten yet
_PRIMARY: Final = conventions.reward_value_key(0)


class LastRewards(SpanProcessor):
    """Store of the last primary reward of each attempt, kept until `forget`; beyond MAX_ATTEMPTS the oldest is dropped."""

    def __init__(self) -> None:
        self._rewards: dict[Key, float] = {}

    @never_raises
    def on_end(self, span: ReadableSpan) -> None:
        """Store the primary reward of an annotation (OpenTelemetry calls this)."""
        attributes = span.attributes or {}
        if span.name != conventions.SPAN_ANNOTATION or attributes.get(conventions.LATE):
            return
        value, key = attributes.get(_PRIMARY), key_of_attributes(span)
        if key is None or isinstance(value, bool) or not isinstance(value, (int, float)):
            return
        while len(self._rewards) >= MAX_ATTEMPTS:
            self._rewards.pop(next(iter(self._rewards)))
        self._rewards[key] = float(value)

    def get(self, key: Key) -> float | None:
        """Return the last reward of an attempt, or None."""
        return self._rewards.get(key)

    def forget(self, key: Key) -> None:
        """Drop the reward of an attempt."""
        self._rewards.pop(key, None)
