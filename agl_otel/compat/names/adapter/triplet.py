"""0.3's `adapter.triplet`: agl_otel.adapters."""

from __future__ import annotations

from agl_otel.adapters import LlmProxyTraceToTriplet, RewardMatchPolicy, TracerTraceToTriplet, TraceToTripletBase, TraceTree

__all__ = ["LlmProxyTraceToTriplet", "RewardMatchPolicy", "TracerTraceToTriplet", "TraceToTripletBase", "TraceTree"]
