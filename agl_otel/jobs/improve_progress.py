"""What a stage of a cycle of `agl-otel improve` tells of itself while it is under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

WAITS_FIRST: Final = {
    "window": "rated attempts",
    "update": "the training",
    "gate": "the evidence",
    "canary": "the canary's start",
    "verdict": "the promotion",
}
"""{stage: what it waits for when it begins}."""
FIRST_SECONDS: Final = 5.0
TOLD_SECONDS: Final = 60.0


@dataclass
class Progress:
    """A stage, or a step of a canary, that is under way."""

    name: str
    """Of the stage; `canary 1`, … are steps of a canary."""
    began: float
    """Unix seconds."""
    waits: str
    """What it waits for, for people."""
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    """What it has found so far, flat."""

    def pause(self, now: float) -> float:
        """Return the seconds until it is told again: the longer it lasts, the more, up to a minute."""
        return min(TOLD_SECONDS, max(FIRST_SECONDS, (now - self.began) / 10))
