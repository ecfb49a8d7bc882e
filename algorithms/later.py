"""Names of 0.3's algorithms that are not here yet: an error that says what to use meanwhile."""

from __future__ import annotations

from typing import Any

from agl_otel.algorithms.base import Algorithm
from agl_otel.errors import UsageError


class _NotYet(Algorithm):
    remedy = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(f"{type(self).__name__} is not here yet: {self.remedy}")


class VERL(_NotYet):
    """Reinforcement learning on verl."""

    remedy = "use algorithms.grpo (`agl-otel train JOB.toml`), which trains with torch"
