"""What differs between the versions of OpenTelemetry, but for log records (logs.py).

An instrumentation may raise DependencyConflictError from 0.55b0 on; the SDK calls `_on_ending` of processors from 1.40 on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from opentelemetry.instrumentation import dependencies
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

if TYPE_CHECKING:
    from agl_otel_hook.processor import AttemptProcessor


class _NeverRaised(Exception):  # noqa: N818  # no error is one
    """Stands for an exception that this version does not have."""


DependencyConflictError: Final[type[Exception]] = getattr(dependencies, "DependencyConflictError", _NeverRaised)
_CALLS_ON_ENDING: Final = hasattr(SpanProcessor, "_on_ending")


class _Ending(SpanProcessor):
    """Calls `_on_ending` of a processor with the ended span, which all processors of a provider share."""

    def __init__(self, processor: AttemptProcessor) -> None:
        self._processor = processor

    def on_end(self, span: ReadableSpan) -> None:
        """Call it (OpenTelemetry calls this)."""
        self._processor._on_ending(span)  # pyright: ignore[reportPrivateUsage]  # OpenTelemetry's name

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Return True: this processor holds no spans."""
        return True


def ending(processor: AttemptProcessor) -> list[SpanProcessor]:
    """Return what to add to a provider before its exporters so that `_on_ending` of `processor` is called; nothing where the SDK does."""
    return [] if _CALLS_ON_ENDING else [_Ending(processor)]
