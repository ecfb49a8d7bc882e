"""Claim rollouts from the queue and run an agent for each.

`runner.py` holds the loop; `agents/` the kinds of agents; `completion.py` what happens when they end.
Pure parts: `environment.py` (the agent's environment), `placeholders.py`, `binding.py`.
The supervisor that starts runners, and what rollouts mean, do not belong here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_otel.compat.runner import LitAgentRunner, Runner

__all__ = ["LitAgentRunner", "Runner"]


def __getattr__(name: str) -> Any:
    """Load the names of Agent Lightning 0.3, which live in the compat layer."""
    if name in __all__:
        from agl_otel.compat import runner

        return getattr(runner, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
