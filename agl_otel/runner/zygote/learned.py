"""What the first forks did that each fork would do again, and the warm parent does once: modules, pydantic models, CA certificates.

A fork that learns says at its end what it loaded and built. Models that a library defers until their first use (openai's) are built in
the parent. Contexts for TLS with a file of CA certificates (httpx makes one for each client, whatever the scheme: 40 ms of a start) are
made ahead; each process gets such a context once and alone, and only while the file and all else that goes into it are as they were.
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
_ready: dict[str, tuple[tuple[int, int, int], ssl.SSLContext]] = {}
"""{CA file: (what it was like, a context with its certificates)}."""


class Learner:
    """In a fork: watches what a run loads and builds."""

    def __init__(self) -> None:
        self._modules = set(sys.modules)
        self._files: dict[str, None] = {}

    def note_file(self, path: str) -> None:
        """A context with this CA file was made."""
        self._files[path] = None

    def result(self) -> dict[str, list[str]]:
        """What the run did, as `Parent` reads it."""
        built = [_name_of(model) for model in _models() if model.__pydantic_complete__ and model.__module__ != "__main__"]
        return {"modules": sorted(set(sys.modules) - self._modules), "models": built, "ca_files": [*self._files]}


def build_models(names: Iterable[str]) -> None:
    """Build those of these models that are here and were deferred."""
    wanted = set(names)
    for model in _models():
        if not model.__pydantic_complete__ and _name_of(model) in wanted:
            try:
                model.model_rebuild(raise_errors=False)
            except Exception:  # noqa: BLE001 - the fork that needs it builds it itself, and says so where it cannot
                continue


def make_contexts(ca_files: Iterable[str]) -> None:
    """Make a context with each of these files."""
    for path in ca_files:
        if path not in _ready and (state := _state_of(path)) is not None:
            try:
                _ready[path] = (state, _create_default_context(cafile=path))
            except (OSError, ssl.SSLError):
                continue


def hand_out_contexts(learner: Learner | None) -> None:
    """In a fork: let `ssl.create_default_context` use what is ready."""

    @wraps(_create_default_context)
    def create_default_context(
        purpose: Any = ssl.Purpose.SERVER_AUTH, *, cafile: Any = None, capath: Any = None, cadata: Any = None
    ) -> Any:
        if isinstance(cafile, str) and purpose is ssl.Purpose.SERVER_AUTH and not capath and not cadata:
            if learner is not None:
                learner.note_file(cafile)
            state, context = _ready.pop(cafile, (None, None))
            if context is not None and state == _state_of(cafile) and _is_as_usual(context):
                return context
        return _create_default_context(purpose, cafile=cafile, capath=capath, cadata=cadata)

    ssl.create_default_context = create_default_context


def _is_as_usual(context: ssl.SSLContext) -> bool:
    """Whether a new context would be like it: nobody replaced the class (truststore does), or wants keys to be logged."""
    return type(context) is ssl.SSLContext and not os.environ.get("SSLKEYLOGFILE")


def _state_of(path: str) -> tuple[int, int, int] | None:
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _models() -> Iterator[Any]:
    """All pydantic models that are loaded."""
    pydantic = sys.modules.get("pydantic")
    waiting: list[Any] = [] if pydantic is None else [pydantic.BaseModel]
    seen: set[int] = set()
    while waiting:
        for model in type.__subclasses__(waiting.pop()):
            if id(model) not in seen:
                seen.add(id(model))
                waiting.append(model)
                yield model


def _name_of(model: Any) -> str:
    return f"{model.__module__}:{model.__qualname__}"
