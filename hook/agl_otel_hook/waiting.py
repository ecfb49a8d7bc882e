"""Instrumentations that wait for their library: what an agent never imports costs it nothing.

Switching on imports the instrumentation and with it parts of the library, so it happens when the process has imported the library
(wrapt.register_post_import_hook). An instrumentation also patches modules that this process has not imported yet, or is just importing, in
this thread or another: `import langgraph.graph` imports langchain_core, whose instrumentation patches langgraph. Importing them there would
find them half imported or wait for a thread that waits for this one, so each is patched when its own import has ended.
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


@dataclass(frozen=True)
class Library:
    """What an instrumentation waits for."""

    name: str
    """The module after whose import the instrumentation is switched on. Not a package whose submodules only the instrumentation imports:
    another thread may hold the lock of a submodule and wait for that of the package."""
    wraps_in: str = ""
    """The module of the instrumentation that names `wrapt.wrap_function_wrapper`; empty where it patches no functions."""
    patched: tuple[str, ...] = ()
    """Modules that the instrumentation patches and that may be half imported when it is switched on."""


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
"""{the module of an instrumentation: what it waits for}. Each costs an agent's start seconds of CPU (CHANGELOG.md); others do not wait."""


class _Patch(NamedTuple):
    """A call of `wrap_function_wrapper` that is to follow."""

    instrumentation: str
    name: str
    wrapper: Any


_waiting: Final[dict[str, list[Callable[[], None]]]] = {}
_unfinished: Final[set[str]] = set()
"""Modules whose import wrapt reports when it has ended."""
_patches: Final[defaultdict[str, deque[_Patch]]] = defaultdict(deque)
"""{a module of these: what patches it then}. A queue, so that of two threads each patch is made by one."""


def _renew_lock() -> None:
    """In a fork: another thread may have held wrapt's lock, and would never let it go here."""
    importer: Any = import_module("wrapt.importer")
    importer._post_import_hooks_lock = threading.RLock()  # nothing public renews it


os.register_at_fork(after_in_child=_renew_lock)


def wait(instrumentation: str, switch_on: Callable[[], None]) -> bool:
    """Have `switch_on` called, once, when the library of `instrumentation` (a module's name) has been imported.

    False where it is to be called now: the instrumentation is not one that waits, or it or its library is imported already.
    """
    library = LIBRARIES.get(instrumentation)
    if library is None or instrumentation in sys.modules or library.name in sys.modules:
        return False
    _waiting.setdefault(instrumentation, []).append(switch_on)
    for module in {library.name, instrumentation, library.wraps_in, *library.patched} - {""}:
        _watch(module)
    return True


def forget(instrumentation: str) -> None:
    """Cancel what waits with this instrumentation, and what it has not patched yet."""
    _waiting.pop(instrumentation, None)
    for patches in list(_patches.values()):
        for patch in [patch for patch in patches if patch.instrumentation == instrumentation]:
            patches.remove(patch)


def forget_all() -> None:
    """Cancel everything that waits."""
    for instrumentation in LIBRARIES:
        forget(instrumentation)


def _watch(module: str) -> None:
    if module not in sys.modules and module not in _unfinished:
        _unfinished.add(module)
        register_post_import_hook(_on_imported, module)


def _on_imported(module: Any) -> None:
    """wrapt calls this in the thread that imports the module, which others that import it wait for."""
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
            switch_on()
        except Exception as error:  # noqa: BLE001 - the boundary: somebody else's instrumentation, in the agent's import
            note_failure(f"switching {instrumentation} on", error)


def _wrap_when_imported(instrumentation: str, *called: Any, **named: Any) -> None:
    """Stands in for `wrap_function_wrapper` in an instrumentation."""
    target = called[0] if called and not named else None
    if isinstance(target, str):
        _watch(target)
    if target not in _unfinished:
        wrap_function_wrapper(*called, **named)
        return
    _patches[target].append(_Patch(instrumentation, *called[1:]))
    if target not in _unfinished:  # another thread's import of it has just ended
        _patch(target)


def _patch(module: str) -> None:
    patches = _patches[module]
    while patches:
        try:
            _, name, wrapper = patches.popleft()
            if not _is_wrapped(module, name, wrapper):
                wrap_function_wrapper(module, name, wrapper)
        except (AttributeError, IndexError):
            pass  # this version of the library has no such function, which instrumentations pass over; or another thread was faster
        except Exception as error:  # noqa: BLE001 - the boundary: somebody else's wrapper, in the agent's import
            note_failure(f"patching {module}", error)


def _is_wrapped(module: str, name: str, wrapper: Any) -> bool:
    """Whether `wrapper` is around the function already: a package re-exports what was patched in its submodule."""
    held: Any = resolve_path(module, name)[2]
    while type(held) is FunctionWrapper:
        if held._self_wrapper is wrapper:
            return True
        held = held.__wrapped__
    return False
