"""0.3's `algorithm.fast`: agl_otel.algorithms."""

from __future__ import annotations

from agl_otel.algorithms import Baseline, FastAlgorithm

__all__ = ["Baseline", "FastAlgorithm"]
