"""0.3's `execution`: agl_otel.compat.execution."""

from __future__ import annotations

from agl_otel.compat import execution
from agl_otel.compat.execution import *  # noqa: F403 - the same names

__all__: list[str] = []
__all__ += execution.__all__
