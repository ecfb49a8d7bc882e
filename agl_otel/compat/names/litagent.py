"""0.3's `litagent`: agl_otel.compat.litagent."""

from __future__ import annotations

from agl_otel.compat.litagent import FunctionalLitAgent, LitAgent, as_agent, is_v0_1_rollout_api, llm_rollout, prompt_rollout, rollout

__all__ = ["FunctionalLitAgent", "LitAgent", "as_agent", "is_v0_1_rollout_api", "llm_rollout", "prompt_rollout", "rollout"]
