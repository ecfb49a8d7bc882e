"""Defer instrumentations until their library is imported: a library that an agent never imports costs it nothing.

Enabling an instrumentation imports it and parts of its library, so it is done when the process has imported the library
(wrapt.register_post_import_hook). An instrumentation also patches modules that this process has not imported yet, or is importing, in this
thread or another: `import langgraph.graph` imports langchain_core, whose instrumentation patches langgraph. Importing such a module at that
point would find it half imported, or deadlock with another thread; so each module is patched at the end of its own import.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

from wrapt import FunctionWrapper, register_post_import_hook, resolve_path, wrap_function_wrapper

from agl_otel_hook.guard import note_failure
from agl_otel_hook.inject.agl_otel_inject import NoWarnings


@dataclass(frozen=True)
class Library:
    """The library that an instrumentation waits for."""

    name: str
    """The module after whose import the instrumentation is enabled. Not a package whose submodules only the instrumentation imports:
    another thread may hold a submodule's import lock while it waits for the package's."""
    wraps_in: str = ""
    """The instrumentation's module that has imported `wrapt.wrap_function_wrapper`; empty if it patches no functions."""
    patched: tuple[str, ...] = ()
    """Modules that the instrumentation patches and that may be half imported when it is enabled."""


LIBRARIES: Final = {
    "opentelemetry.instrumentation.anthropic": Library("anthropic", "opentelemetry.instrumentation.anthropic"),
    "opentelemetry.instrumentation.crewai": Library("crewai", "opentelemetry.instrumentation.crewai.instrumentation"),
    "opentelemetry.instrumentation.langchain": Library(
        "langchain_core.callbacks",
        "opentelemetry.instrumentation.langchain",
        (
            *("langchain.agents", "langchain.agents.factory", "langchain.agents.middleware.types"),
            *("langchain_community.llms.openai", "langchain_openai.chat_models.base", "langchain_openai.llms.base"),
            *("langgraph.prebuilt", "langgraph.prebuilt.chat_agent_executor", "langgraph.pregel", "langgraph.types"),
        ),
    ),
    "opentelemetry.instrumentation.openai": Library(
        "openai",
        "opentelemetry.instrumentation.openai.v1",
        (
            *("openai.resources.chat.completions", "openai.resources.completions", "openai.resources.embeddings"),
            *("openai.resources.images", "openai.resources.responses", "openai.resources.beta.assistants"),
            *("openai.resources.beta.threads.messages", "openai.resources.beta.threads.runs"),
        ),
    ),
    "opentelemetry.instrumentation.openai_agents": Library("agents"),
}
"""{module of an instrumentation: its library}. Each takes seconds of CPU at an agent's start (CHANGELOG.md); others are not deferred."""


class _Patch(NamedTuple):
    """A deferred call of `wrap_function_wrapper`."""

    instrumentation: str
    name: str
    wrapper: Any


_waiting: Final[dict[str, list[Callable[[], None]]]] = {}
_unfinished: Final[set[str]] = set()
"""Modules that are not fully imported and whose import hook is registered."""
_patches: Final[defaultdict[str, deque[_Patch]]] = defaultdict(deque)
"""{such a module: its deferred patches}. A queue: when two threads patch a module, each patch is applied once."""


def _renew_lock() -> None:
    """Replace wrapt's lock in a fork: a thread of the parent may have held it, and would never release it here."""
    importer: Any = import_module("wrapt.importer")
    importer._post_import_hooks_lock = threading.RLock()  # there is no public way


os.register_at_fork(after_in_child=_renew_lock)


def wait(instrumentation: str, switch_on: Callable[[], None]) -> bool:
    """Call `switch_on` once when the library of `instrumentation` (a module's name) has been imported.

    Return False where the caller must call it now: the instrumentation is not deferred, or it or its library is imported already.
    """
    library = LIBRARIES.get(instrumentation)
    if library is None or instrumentation in sys.modules or library.name in sys.modules:
        return False
    _waiting.setdefault(instrumentation, []).append(switch_on)
    for module in {library.name, instrumentation, library.wraps_in, *library.patched} - {""}:
        _watch(module)
    return True


def forget(instrumentation: str) -> None:
    """Cancel what is deferred of this instrumentation: enabling it, and its patches."""
    _waiting.pop(instrumentation, None)
    for patches in list(_patches.values()):
        for patch in [patch for patch in patches if patch.instrumentation == instrumentation]:
            patches.remove(patch)


def forget_all() -> None:
    """Cancel everything that is deferred."""
    for instrumentation in LIBRARIES:
        forget(instrumentation)


def _watch(module: str) -> None:
    if module not in sys.modules and module not in _unfinished:
        _unfinished.add(module)
        register_post_import_hook(_on_imported, module)


def _on_imported(module: Any) -> None:
    """Enable and patch (wrapt calls this in the importing thread, for which other importers of the module wait)."""
    name = module.__name__
    _unfinished.discard(name)
    for instrumentation, library in LIBRARIES.items():
        if name == library.wraps_in:
            module.wrap_function_wrapper = partial(_wrap_when_imported, instrumentation)
        if name in (library.name, instrumentation):
            _switch_on(instrumentation, library)
    _patch(name)


def _switch_on(instrumentation: str, library: Library) -> None:
    if library.name not in sys.modules or (instrumentation in sys.modules and instrumentation in _unfinished):
        return  # the agent imports the instrumentation itself: with the library, or before it
    for switch_on in _waiting.pop(instrumentation, []):
        try:
            with NoWarnings():
                switch_on()
        except Exception as error:  # noqa: BLE001 - the boundary: somebody else's instrumentation, in the agent's import
            note_failure(f"switching {instrumentation} on", error)


def _wrap_when_imported(instrumentation: str, *called: Any, **named: Any) -> None:
    """Patch now or after the target's import; replaces `wrap_function_wrapper` in an instrumentation."""
    target = called[0] if called and not named else None
    if isinstance(target, str):
        _watch(target)
    if target not in _unfinished:
        wrap_function_wrapper(*called, **named)
        return
    _patches[target].append(_Patch(instrumentation, *called[1:]))
    if target not in _unfinished:  # meanwhile its import ended in another thread
        _patch(target)


def _patch(module: str) -> None:
    patches = _patches[module]
    while patches:
        try:
            _, name, wrapper = patches.popleft()
            if not _is_wrapped(module, name, wrapper):
                wrap_function_wrapper(module, name, wrapper)
        except (AttributeError, IndexError):
            pass  # this version of the library lacks the function, which instrumentations ignore; or another thread was faster
        except Exception as error:  # noqa: BLE001 - the boundary: somebody else's wrapper, in the agent's import
            note_failure(f"patching {module}", error)


def _is_wrapped(module: str, name: str, wrapper: Any) -> bool:
    """Return whether `wrapper` wraps the function already: a package may re-export what was patched in its submodule."""
    held: Any = resolve_path(module, name)[2]
    while type(held) is FunctionWrapper:
        if held._self_wrapper is wrapper:
            return True
        held = held.__wrapped__
    return False
