"""Names of 0.3's algorithms that are not here yet: an error that says what to use meanwhile."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from agl_otel.algorithms.base import Algorithm
from agl_otel.errors import UsageError

T = TypeVar("T")


class _NotYet(Algorithm):
    remedy = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError(f"{type(self).__name__} is not here yet: {self.remedy}")


class APO(_NotYet, Generic[T]):
    """Automatic prompt optimisation."""

    remedy = "write the loop as an @algo function (examples/tutorial/fit.py picks the best of several prompts)"


class VERL(_NotYet):
    """Reinforcement learning on verl."""

    remedy = "use algorithms.grpo (`agl-otel train JOB.toml`), which trains with torch"
