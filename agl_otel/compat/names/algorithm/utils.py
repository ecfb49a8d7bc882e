"""0.3's `algorithm.utils`: agl_otel.algorithms."""

from __future__ import annotations

from agl_otel.algorithms import batch_iter_over_dataset, with_llm_proxy, with_store

__all__ = ["batch_iter_over_dataset", "with_llm_proxy", "with_store"]
