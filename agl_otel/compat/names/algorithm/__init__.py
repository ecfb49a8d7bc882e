"""0.3's `algorithm`: agl_otel.algorithms."""

from __future__ import annotations

from agl_otel.algorithms import APO, VERL, Algorithm, Baseline, FastAlgorithm, FunctionalAlgorithm, algo

__all__ = ["APO", "VERL", "Algorithm", "Baseline", "FastAlgorithm", "FunctionalAlgorithm", "algo"]
