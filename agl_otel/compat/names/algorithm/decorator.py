"""0.3's `algorithm.decorator`: agl_otel.algorithms."""

from __future__ import annotations

from agl_otel.algorithms import FunctionalAlgorithm, algo

__all__ = ["FunctionalAlgorithm", "algo"]
