"""Remove the wrappers that an instrumentation's `uninstrument()` leaves.

OpenLLMetry's instrumentation of the OpenAI SDK calls `unwrap("openai.resources.chat.completions", "Completions.create")`; OpenTelemetry's
`unwrap` looks for one attribute of that name, finds none and does nothing. Calls would go on making spans, and the next `instrument()`
would add a second wrapper, so that each call makes two.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from wrapt import FunctionWrapper


def remove_wrappers(instrumentor: Any) -> None:
    """Restore every function and method that a wrapper of this instrumentor's package still wraps."""
    package = type(instrumentor).__module__
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):  # pyright: ignore[reportUnnecessaryIsInstance] - it may hold None and other objects
            continue
        # type(): `__class__` of a lazy module-level object would create the object
        classes = [held for held in list(vars(module).values()) if issubclass(type(held), type) and held.__module__ == module.__name__]
        for owner in (module, *classes):
            for name, held in list(vars(owner).items()):
                original: Any = held
                while type(original) is FunctionWrapper and _is_of(original, package):
                    original = original.__wrapped__
                if original is not held:
                    setattr(owner, name, original)


def _is_of(wrapper: Any, package: str) -> bool:
    made_in: str = getattr(wrapper._self_wrapper, "__module__", None) or ""
    return made_in == package or made_in.startswith(f"{package}.")
