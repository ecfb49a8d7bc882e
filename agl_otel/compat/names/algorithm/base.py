"""0.3's `algorithm.base`: agl_otel.algorithms."""

from __future__ import annotations

from agl_otel.algorithms import Algorithm

__all__ = ["Algorithm"]
