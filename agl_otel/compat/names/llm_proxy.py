"""0.3's `llm_proxy`: agl_otel.compat.llm_proxy."""

from __future__ import annotations

from agl_otel.compat.llm_proxy import LLMProxy, ModelConfig

__all__ = ["LLMProxy", "ModelConfig"]
