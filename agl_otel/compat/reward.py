"""0.3's `reward` (deprecated there): agl_otel.emit."""

from __future__ import annotations

from agl_otel.emit import (
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward,
)

__all__ = ["emit_reward", "find_final_reward", "find_reward_spans", "get_reward_value", "get_rewards_from_span", "is_reward_span", "reward"]
