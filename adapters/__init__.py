"""Convert spans and columns to training samples, and judge policies by them. Pure.

On columns (algorithms): to_trajectories. On lists of spans, with Agent Lightning 0.3's names: TraceToMessages, TracerTraceToTriplet,
LlmProxyTraceToTriplet. agl_otel/spans/dialects decodes the model calls of each instrumentation.
"""

from __future__ import annotations

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
