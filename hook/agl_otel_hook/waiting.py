"""Instrumentations that wait for their library: what an agent never imports costs it nothing.

Switching on imports the library, so an instrumentation waits until the process is about to import it, and is switched on just *before*:
it patches other packages of the library's family, too, and after the library was imported one of these may be half imported
(`import langgraph.graph` imports langchain_core). A finder ahead of all others watches for the family's names. Its loader has the library
imported, switches on, and hands over the module that is then there; an import that fails there is done again, and fails as it would have.

No lock is taken but those of Python's own import system, one for each module. Another thread that imports the library waits until it is
patched. It may wait with the lock of a submodule in its hands that switching on has to import; then this thread lets it go first, because
Python ends such a circle by making one of the two imports fail.
"""

from __future__ import annotations

import _thread
import contextlib
import importlib
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, cast

from agl_otel_hook.guard import note_failure


@dataclass(frozen=True)
class Library:
    """What an instrumentation waits for."""

    name: str
    """A top-level module."""
    family: tuple[str, ...] = ()
    """How the names of other top-level modules begin that the instrumentation imports, or that are imported by those."""

    def has(self, name: str) -> bool:
        """Whether the module `name` is the library or the top of one of its family."""
        return name == self.name or ("." not in name and name.startswith(self.family))


LIBRARIES: Final = {
    "opentelemetry.instrumentation.anthropic": Library("anthropic"),
    "opentelemetry.instrumentation.crewai": Library("crewai"),
    "opentelemetry.instrumentation.langchain": Library("langchain_core", ("langchain", "langgraph")),
    "opentelemetry.instrumentation.openai": Library("openai"),
    "opentelemetry.instrumentation.openai_agents": Library("agents"),
}
"""{the module of an instrumentation: what it waits for}. Each costs an agent's start seconds of CPU (CHANGELOG.md); others do not wait."""
_LOCKS: Final[Any] = importlib.import_module("importlib._bootstrap")
"""Where the import system's own locks are; nothing public names them. Without them two threads that import at once may fail, as ever."""
_waiting: Final[dict[str, list[Callable[[], None]]]] = {}


def wait(instrumentation: str, switch_on: Callable[[], None]) -> bool:
    """Have `switch_on` called, once, when the library of `instrumentation` (a module's name) or that module is about to be imported.

    False where it is to be called now: the instrumentation is not one that waits, or of its library something is imported already.
    """
    library = LIBRARIES.get(instrumentation)
    if library is None or instrumentation in sys.modules or any(library.has(name) for name in list(sys.modules)):
        return False
    _waiting.setdefault(instrumentation, []).append(switch_on)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return True


def forget(instrumentation: str) -> None:
    """Whoever waits with this instrumentation is not called any more."""
    _waiting.pop(instrumentation, None)


def forget_all() -> None:
    """Nobody is called any more."""
    _waiting.clear()


class _Finder:
    """Finds what others find, and has those called first who wait for it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        called = [name for name in list(_waiting) if fullname == name or LIBRARIES[name].has(fullname)]
        spec = _found_by_others(fullname, path, target) if called else None
        if spec is not None:
            spec.loader = cast("Any", _Loader(spec.loader, called))
        return spec


_finder: Final[Any] = _Finder()


def _found_by_others(fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find: Any = getattr(finder, "find_spec", None)
        if finder is not _finder and find is not None and (spec := find(fullname, path, target)) is not None:
            return spec
    return None


class _Loader:
    """Stands before a module's own loader until the module is there."""

    def __init__(self, own: Any, called: Sequence[str]) -> None:
        self._own = own
        """None for a namespace package."""
        self._called = called
        self._loaded: ModuleSpec | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Switch on (the import system calls this); then the module that this has imported, if it has."""
        for instrumentation in self._called:
            _switch_on(instrumentation, spec.name)
        module = sys.modules.get(spec.name)
        if module is not None:
            self._loaded = module.__spec__
            return module
        if cast("Any", spec.loader) is self:  # nobody put one of theirs before it
            spec.loader = self._own
        return self._own.create_module(spec) if hasattr(self._own, "create_module") else None

    def exec_module(self, module: ModuleType) -> None:
        """Run the module (the import system calls this), unless it has run."""
        if self._loaded is not None:
            module.__spec__, self._loaded = self._loaded, None
        elif self._own is not None:
            self._own.exec_module(module)


def _switch_on(instrumentation: str, imported: str) -> None:
    """Call those who wait with it, while this thread imports `imported`; they wait on where the library cannot be imported."""
    library = LIBRARIES[instrumentation].name
    if imported != library:
        with _unlocked(imported), contextlib.suppress(Exception):  # which the agent's own import of it will raise
            importlib.import_module(library)  # and so comes by here
        return
    waiting = _waiting.pop(instrumentation, [])
    try:
        importlib.import_module(library)
    except Exception:  # noqa: BLE001 - the agent's own import, which comes next, raises it, too
        if waiting:
            _waiting[instrumentation] = waiting
        return
    with _unlocked(imported) if _held_by_others(instrumentation) else contextlib.nullcontext():
        for switch_on in waiting:
            try:
                switch_on()
            except Exception as error:  # noqa: BLE001 - the boundary: somebody else's instrumentation, in the agent's import
                note_failure(f"switching {instrumentation} on", error)


@contextlib.contextmanager
def _unlocked(module: str) -> Generator[None]:
    """Without this thread's lock of a module that it imports."""
    lock = _own_lock(module)
    if lock is not None:
        lock.release()
    try:
        yield
    finally:
        if lock is not None:
            lock.acquire()


def _own_lock(module: str) -> Any:
    """This thread's lock of a module; None where it has none (its loader was called by hand), or this Python keeps them elsewhere."""
    with contextlib.suppress(AttributeError):
        lock: Any = _LOCKS._get_module_lock(module)
        return lock if lock.owner == _thread.get_ident() else None
    return None


def _held_by_others(instrumentation: str) -> bool:
    """Whether other threads are importing something of the library's family."""
    library, me = LIBRARIES[instrumentation], _thread.get_ident()
    with contextlib.suppress(AttributeError):
        locks: list[Any] = [ref() for name, ref in list(_LOCKS._module_locks.items()) if library.has(name.partition(".")[0])]
        return any(lock is not None and lock.owner not in (None, me) for lock in locks)
    return False
