"""Split OpenTelemetry's auto-instrumentation between the warm parent and its forks.

In the parent, every instrumentor patches its library before a tracer provider exists; their proxy tracers use the later one. In the
fork, the provider and its exporters are made (by a distribution, else by the hook), and the entry points before and after
instrumentation run. The order is that of opentelemetry-instrument, except that the instrumentors come first.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import socket
import stat
import sys
import sysconfig
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from opentelemetry.instrumentation import auto_instrumentation
from opentelemetry.instrumentation.auto_instrumentation import _load  # private, used by opentelemetry-instrument; the version is pinned

import agl_otel_hook

PRE: Final = "opentelemetry_pre_instrument"
POST: Final = "opentelemetry_post_instrument"
AUTO_FOLDER: Final = str(Path(auto_instrumentation.__file__).parent)
"""Put on PYTHONPATH, as opentelemetry-instrument does, so that the agent's Python subprocesses are instrumented."""
_STARTUP_MODULES: Final = (
    "opentelemetry.sdk._configuration",
    "opentelemetry.sdk._logs.export",
    "agl_otel_hook.hook",
    "agl_otel_hook.logs",
    "agl_otel_hook.emit.emitters",
)
_POOLS: Final = ("openblas", "libmkl", "libomp", "libgomp")
"""Libraries whose native threads a fork restarts (they register fork handlers)."""


def instrument_parent() -> None:
    """Patch libraries, without creating a provider, an exporter or the hook."""
    entry_points: Any = _load.entry_points
    _load.entry_points = lambda **select: () if select.get("group") in (PRE, POST) else entry_points(**select)
    try:
        distro = _load._load_distro()  # pyright: ignore[reportPrivateUsage]  # see the import
        distro.configure()
        _load._load_instrumentors(distro)  # pyright: ignore[reportPrivateUsage]  # see the import
    finally:
        _load.entry_points = entry_points
    for name in _STARTUP_MODULES:
        importlib.import_module(name)


def instrument_child() -> None:
    """Create what belongs to one process: provider, exporters, hook."""
    _load._load_configurators()  # pyright: ignore[reportPrivateUsage]  # see the import
    for group, ours in ((PRE, agl_otel_hook.pre_instrument), (POST, agl_otel_hook.post_instrument)):
        ours()  # it need not be installed; a second call does nothing
        for entry_point in _load.entry_points(group=group):
            entry_point.load()()


def preload(names: Iterable[str]) -> None:
    """Import those of the modules that are installed. Errors are ignored: the agent's own import raises them again."""
    for name in names:
        if name not in sys.modules and _is_installed(name):
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 - library code; see above
                continue


def preload_named(names: Iterable[str]) -> None:
    """Import modules that the user named, also from the working directory. Raises what they raise."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        sys.path.pop(0)


def of_packages(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Select the modules of `names` that belong to a top-level package of `known`."""
    packages = {name.partition(".")[0] for name in known}
    return [name for name in names if name.partition(".")[0] in packages]


def unfit(control: socket.socket) -> str | None:
    """Return why this process must not be forked; None where it may be."""
    main = threading.main_thread()
    if threads := [thread.name for thread in threading.enumerate() if thread is not main]:
        return f"threads run in the warm parent ({', '.join(threads)}): a module starts them when it is imported"
    if len(list(Path("/proc/self/task").iterdir())) > 1 and not _has_pools():
        return "native threads run in the warm parent: a library starts them when it is imported"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in the warm parent"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return f"the system refuses pidfd_open, by which the warm parent learns that an agent has ended ({error})"
    if sockets := [fd for fd in _sockets() if fd != control.fileno()]:
        return f"the warm parent holds {len(sockets)} open sockets: a module opens them when it is imported"
    return None


def _has_pools() -> bool:
    maps = Path("/proc/self/maps").read_text()
    return any(name in maps for name in _POOLS)


def _sockets() -> list[int]:
    found: list[int] = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                found.append(int(entry.name))
    return found


def _is_installed(name: str) -> bool:
    """Return whether a module belongs to the interpreter or its site-packages, rather than to the user's code."""
    try:
        spec = importlib.util.find_spec(name.partition(".")[0])
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    if spec.origin in ("built-in", "frozen") or spec.origin is None:
        return True
    folders = {str(Path(path).resolve()) for key, path in sysconfig.get_paths().items() if "lib" in key}
    return any(str(Path(spec.origin).resolve()).startswith(folder + os.sep) for folder in folders)
