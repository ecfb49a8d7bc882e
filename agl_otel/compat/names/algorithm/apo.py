"""0.3's `algorithm.apo`: agl_otel.algorithms."""

from __future__ import annotations

from agl_otel.algorithms import APO

__all__ = ["APO"]
