"""What the warm parent does ahead, and what is left for its forks: OpenTelemetry's auto-instrumentation, cut in two.

Ahead: every instrumentor patches its library, while no tracer provider exists; the tracers that they keep find the one that comes.
In the fork: the provider with its exporters (a distribution's, else the hook's), and the entry points before and after
instrumentation. That is the order of opentelemetry-instrument but for the instrumentors, which come first here.
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
from opentelemetry.instrumentation.auto_instrumentation import _load  # what opentelemetry-instrument itself runs; pinned exactly

PRE: Final = "opentelemetry_pre_instrument"
POST: Final = "opentelemetry_post_instrument"
AUTO_FOLDER: Final = str(Path(auto_instrumentation.__file__).parent)
"""In PYTHONPATH, it has the agent's own Python subprocesses instrumented, as opentelemetry-instrument does."""
_USED_BY_A_START: Final = (
    "opentelemetry.sdk._configuration",
    "opentelemetry.sdk._logs.export",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.exporter.otlp.proto.http._log_exporter",
    "agl_otel_hook.hook",
    "agl_otel_hook.emit.emitters",
)
_POOLS: Final = ("openblas", "libmkl", "libomp", "libgomp")
"""Libraries whose native threads a fork restarts (they register fork handlers)."""


def instrument_parent() -> None:
    """Patch libraries; make no provider, no exporter, no hook."""
    entry_points: Any = _load.entry_points
    _load.entry_points = lambda **select: () if select.get("group") in (PRE, POST) else entry_points(**select)
    try:
        distro = _load._load_distro()  # pyright: ignore[reportPrivateUsage]  # see the import
        distro.configure()
        _load._load_instrumentors(distro)  # pyright: ignore[reportPrivateUsage]  # see the import
    finally:
        _load.entry_points = entry_points
    for name in _USED_BY_A_START:
        importlib.import_module(name)


def instrument_child() -> None:
    """Make what belongs to one process: provider, exporters, hook."""
    _load._load_configurators()  # pyright: ignore[reportPrivateUsage]  # see the import
    for group in (PRE, POST):
        for entry_point in _load.entry_points(group=group):
            entry_point.load()()


def preload(names: Iterable[str]) -> None:
    """Import installed modules; one that fails here will say so in the agent's own run."""
    for name in names:
        if name not in sys.modules and _is_installed(name):
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 - see above
                continue


def preload_as_told(names: Iterable[str]) -> None:
    """Import modules that the user named, their own among them; whatever these raise comes out."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        sys.path.pop(0)


def of_packages(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Those of the modules `names` that belong to a package of `known`."""
    packages = {name.partition(".")[0] for name in known}
    return [name for name in names if name.partition(".")[0] in packages]


def unfit(control: socket.socket) -> str | None:
    """Why this process must not be forked; None where it may be."""
    own = threading.main_thread()
    if threads := [thread.name for thread in threading.enumerate() if thread is not own]:
        return f"threads run in the warm parent ({', '.join(threads)}): a module starts them when it is imported"
    if len(list(Path("/proc/self/task").iterdir())) > 1 and not _has_pools():
        return "native threads run in the warm parent: a library starts them when it is imported"
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialised in the warm parent"
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
    """Whether a module comes with the interpreter or from its site-packages: the user's own are for each run."""
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
