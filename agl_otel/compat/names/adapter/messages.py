"""0.3's `adapter.messages`: agl_otel.adapters."""

from __future__ import annotations

from agl_otel.adapters import TraceToMessages

__all__ = ["TraceToMessages"]
