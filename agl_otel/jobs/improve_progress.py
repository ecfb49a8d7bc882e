"""What a stage of a cycle of `agl-otel improve` tells of itself while it is under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from agl_otel.jobs.improve_evidence import Arms

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


def window_waits(*, seen: int, rated: int, wanted: int, unrated: int, missing: int) -> str:
    """Return what a window waits for, for people.

    Args:
        seen: attempts of the product that no earlier cycle took.
        rated, unrated: those that may be learnt from with a reward, and without.
        wanted: how many of them a cycle needs with one.
        missing: how many more need a trusted reward.
    """
    if not seen:
        return (
            "no conversation of the product is here: its calls have to reach the stack's proxy without the ids of a rollout, and the stack "
            "to adopt their traces (AGL_UNIDENTIFIED=adopt)"
        )
    line = f"{rated} of {wanted} attempts are rated, {unrated} have no reward"
    return line + (f"; {missing} more need a trusted one" if missing > 0 else "")


def canary_waits(arms: Arms, *, rated: int, most: int, wait: float) -> str:
    """Return what a step of a canary waits for, for people.

    Args:
        arms: its conversations so far.
        rated: how many of them it needs with a reward.
        most: how many it may take.
        wait: how long it waits for their rewards then, in seconds.
    """
    line = (
        f"{len(arms.canary)} of {rated} rewards; {arms.begun} of at most {most} conversations; "
        f"{len(arms.promoted)} rewards of what is promoted"
    )
    until = "" if arms.filled is None else f"; until {time.strftime('%H:%M:%S', time.localtime(arms.filled + wait))} at most"
    return line + until
