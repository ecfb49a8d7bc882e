"""How much the model calls of an attempt may be. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from agl_otel.errors import UsageError
from agl_otel.types import Rollout


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of one attempt; 0 is no limit, None the proxy's default."""

    calls: int | None = 0
    tokens: int | None = 0
    """Sampled tokens."""

    def or_else(self, default: Budget) -> Budget:
        """Return the budget with `default` for what is None."""
        return Budget(self.calls if self.calls is not None else default.calls, self.tokens if self.tokens is not None else default.tokens)


def budget_of(rollout: Rollout) -> Budget | None:
    """The budget in the rollout's metadata ({"budget": {"calls": 50, "tokens": 20000}}); None if there is none. Raises UsageError."""
    given: Any = (rollout.metadata or {}).get("budget")
    if given is None:
        return None
    held = cast("dict[str, Any]", given) if isinstance(given, dict) else {"": given}
    numbers = {name: int(value) for name, value in held.items() if _is_whole(value) and value >= 0}
    if held.keys() != numbers.keys() or not held.keys() <= {"calls", "tokens"}:
        raise UsageError(
            f'the budget of rollout {rollout.rollout_id} must be {{"calls": N, "tokens": N}} or one of them, not {given!r:.200}'
        )
    return Budget(numbers.get("calls"), numbers.get("tokens"))


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())  # metadata may have passed through JavaScript
