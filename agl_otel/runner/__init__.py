"""The runner: claims rollouts from the queue and runs an agent for each.

`runner.py` holds the loop; `command.py` and `function.py` the two kinds of agents; `ending.py` what happens when they end.
Pure parts: `environment.py` (the agent's environment), `placeholders.py`, `binding.py`.
The supervisor that starts runners, and what rollouts mean, do not belong here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agl_otel.runner.litagent import LitAgentRunner, Runner

__all__ = ["LitAgentRunner", "Runner"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # loaded when asked for: a runner of commands needs none of it
        from agl_otel.runner import litagent

        return getattr(litagent, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
