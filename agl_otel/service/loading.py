"""Load a function by reference: `pkg.mod:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from agl_otel.errors import UsageError


def load_function(reference: str) -> Callable[..., Any]:
    """Load the function that `reference` names.

    The file's folder (for a module, the working directory) is added to sys.path, as Python does for a script, so that the file's own
    imports work. Raises UsageError where the reference is malformed, the file or module is missing or fails, or it lacks the name.
    """
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{reference!r} does not name a function: write path/to/file.py:function or package.module:function")
    module = _from_file(Path(where)) if where.endswith(".py") or "/" in where else _from_name(where)
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is None:
        defined = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise UsageError(f"{where} has no {name!r}; its functions are: {', '.join(defined) or 'none'}")
    if not callable(found):
        raise UsageError(f"{reference} is a {type(found).__name__}, not a function")
    return found


def _from_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    _add_to_path(path.parent)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known  # an agent and a grader from one file share its globals
    name = path.stem if known is None and path.stem.isidentifier() else f"agl_user_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code: any exception becomes an error that names the file
        del sys.modules[name]
        raise UsageError(f"{path} could not be loaded: {type(error).__name__}: {error}") from error
    return module


def _from_name(name: str) -> ModuleType:
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except Exception as error:  # user code: any exception becomes an error that names the module
        raise UsageError(f"module {name} could not be loaded: {type(error).__name__}: {error}") from error


def _add_to_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
