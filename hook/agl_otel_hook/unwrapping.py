"""Take off what an instrumentation's `uninstrument()` leaves on.

OpenLLMetry's for the OpenAI SDK asks `unwrap("openai.resources.chat.completions", "Completions.create")`, which OpenTelemetry's `unwrap`
looks up as one attribute of that name and passes over: the calls go on making spans, and the next `instrument()` puts a second wrapper
around the first, so that each call makes two.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from wrapt import FunctionWrapper


def unwrap_leftovers(instrumentor: Any) -> None:
    """Put back every function and method that a wrapper of this instrumentor's package is still around."""
    package = type(instrumentor).__module__
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):  # pyright: ignore[reportUnnecessaryIsInstance] - None and other objects stand there, too
            continue
        # type(): asking a lazy module-level object for its class would make it
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
