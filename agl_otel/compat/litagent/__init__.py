"""Agent Lightning 0.3's agents: a class with `rollout`, or a decorated function."""

from __future__ import annotations

from agl_otel.compat.litagent.agent import LitAgent, is_v0_1_rollout_api
from agl_otel.compat.litagent.decorators import FunctionalLitAgent, as_agent, llm_rollout, prompt_rollout, rollout

__all__ = ["FunctionalLitAgent", "LitAgent", "as_agent", "is_v0_1_rollout_api", "llm_rollout", "prompt_rollout", "rollout"]
