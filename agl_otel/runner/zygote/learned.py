"""Do in the warm parent, once, what its first forks did and every fork would repeat: import modules, build models, load CA files.

The first forks report at their end what they loaded and built. pydantic models that a library defers until first use (openai's) are
built in the parent. TLS contexts with a CA file (httpx makes one for each client, which takes 40 ms) are prepared in the parent. A
process gets a prepared context only once, and only if the CA file and ssl.SSLContext are unchanged.
"""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Iterable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any, Final

_create_default_context: Final = ssl.create_default_context
_prepared: dict[str, tuple[tuple[int, int, int], ssl.SSLContext]] = {}
"""{CA file: ((inode, size, mtime in ns) when it was loaded, a context with its certificates)}."""


class Learner:
    """Records, in a fork, what a run loads and builds."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._files: dict[str, None] = {}

    def note_file(self, path: str) -> None:
        """Record that a context with this CA file was made."""
        self._files[path] = None

    def result(self) -> dict[str, list[str]]:
        """Return {modules, models, ca_files} of the run, for `Parent`."""
        built = [_name_of(model) for model in _models() if model.__pydantic_complete__ and model.__module__ != "__main__"]
        return {"modules": sorted(set(sys.modules) - self._modules), "models": built, "ca_files": [*self._files]}


def build_models(names: Iterable[str]) -> None:
    """Build the loaded pydantic models of these names that are deferred."""
    requested = set(names)
    for model in _models():
        if not model.__pydantic_complete__ and _name_of(model) in requested:
            try:
                model.model_rebuild(raise_errors=False)
            except Exception:  # noqa: BLE001 - library code: the fork that needs the model builds it, and raises the error
                continue


def make_contexts(ca_files: Iterable[str]) -> None:
    """Prepare a TLS context with each of these CA files."""
    for path in ca_files:
        if path not in _prepared and (state := _state_of(path)) is not None:
            try:
                _prepared[path] = (state, _create_default_context(cafile=path))
            except (OSError, ssl.SSLError):
                continue


def use_prepared_contexts(learner: Learner | None) -> None:
    """Let `ssl.create_default_context`, in a fork, return prepared contexts, and report CA files to `learner`."""

    @wraps(_create_default_context)
    def create_default_context(
        purpose: Any = ssl.Purpose.SERVER_AUTH, *, cafile: Any = None, capath: Any = None, cadata: Any = None
    ) -> Any:
        if isinstance(cafile, str) and purpose is ssl.Purpose.SERVER_AUTH and not capath and not cadata:
            if learner is not None:
                learner.note_file(cafile)
            state, context = _prepared.pop(cafile, (None, None))
            if context is not None and state == _state_of(cafile) and _is_reusable(context):
                return context
        return _create_default_context(purpose, cafile=cafile, capath=capath, cadata=cadata)

    ssl.create_default_context = create_default_context


def _is_reusable(context: ssl.SSLContext) -> bool:
    """Return whether a new context would be equal: the class is not replaced (as truststore does) and keys are not logged."""
    return type(context) is ssl.SSLContext and not os.environ.get("SSLKEYLOGFILE")


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _models() -> Iterator[Any]:
    """Yield all loaded pydantic models."""
    pydantic = sys.modules.get("pydantic")
    pending: list[Any] = [] if pydantic is None else [pydantic.BaseModel]
    seen: set[int] = set()
    while pending:
        for model in type.__subclasses__(pending.pop()):
            if id(model) not in seen:
                seen.add(id(model))
                pending.append(model)
                yield model


def _name_of(model: Any) -> str:
    return f"{model.__module__}:{model.__qualname__}"
