"""0.3's `instrumentation`: every instrumentation that is installed, in this process."""

from __future__ import annotations

from agl_otel.telemetry.setup import instrument_all, uninstrument_all

__all__ = ["instrument_all", "uninstrument_all"]
