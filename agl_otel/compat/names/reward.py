"""0.3's `reward` (deprecated there): agl_otel_hook.emit and agl_otel.spans."""

from __future__ import annotations

from agl_otel.spans.emitted import find_final_reward, find_reward_spans, get_reward_value, get_rewards_from_span, is_reward_span
from agl_otel_hook.emit import emit_reward, reward

__all__ = ["emit_reward", "find_final_reward", "find_reward_spans", "get_reward_value", "get_rewards_from_span", "is_reward_span", "reward"]
