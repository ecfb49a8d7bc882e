"""Let an MCP server that the agent starts over stdio inherit the attempt, and the hook.

The package `mcp` starts such a server with a few variables of the environment only. With these, its spans are recorded as those of the
agent's other processes are. That they stand below the call of the tool is done by `mcp` (from 2 on) or an instrumentation of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from wrapt import register_post_import_hook, wrap_function_wrapper

from agl_otel_hook import conventions
from agl_otel_hook.guard import never_raises

INHERITED: Final = (
    *("BAGGAGE", "TRACEPARENT", "TRACESTATE"),
    *(conventions.ENV_ROLLOUT_ID, conventions.ENV_ATTEMPT_ID, conventions.ENV_LEDGER, conventions.ENV_OTLP_HTTP),
    *(conventions.ENV_HOOK, conventions.ENV_HOOK_SKIP, conventions.ENV_HOOK_PACKAGES),
)
"""Besides those of OpenTelemetry, OTEL_*. The task is not among them."""
INJECT: Final = str(Path(__file__).with_name("inject"))


@never_raises
def begin() -> None:
    """Do so from now on."""
    register_post_import_hook(_wrap, "mcp.client.stdio")


@never_raises
def _wrap(module: Any) -> None:
    def with_ours(wrapped: Callable[[], dict[str, str]], instance: object, args: Any, kwargs: Any) -> dict[str, str]:
        return {**inherited(os.environ), **wrapped()}

    wrap_function_wrapper(module, "get_default_environment", with_ours)


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what a server inherits of an environment; of PYTHONPATH our own folder."""
    found = {name: value for name, value in environ.items() if name in INHERITED or name.startswith("OTEL_")}
    ours = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.realpath(folder) == os.path.realpath(INJECT)]
    return {**found, "PYTHONPATH": ours[0]} if ours else found
