"""The code of a job that decides what its rewards mean: agent, grader and custom algorithm (with its adapter), as digests of their files.

Files are found without running them: the file that a reference names, the modules that it imports from its own folder or the job's
(standard library's modulefinder), and the files that a command names. Modules imported under a computed name are not found.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec, PathFinder
from modulefinder import ModuleFinder
from pathlib import Path

from agl_otel.algorithms.checked_files import digest_of, file_digest
from agl_otel.jobs.job import Job

_log = logging.getLogger(__name__)


def sources_of(job: Job) -> dict[str, str]:
    """Return {role: reference, "role file": SHA-256} of the job's agent, grader, custom algorithm and credit; `role` is one of these words.

    A file's name is relative to the job's folder if it lies there. A command's reference is a digest, since it may hold a key.
    """
    agent, name, folder = job.agent, str(job.algorithm.get("name", "")), job.folder.resolve()
    found: dict[str, str] = {}
    credit = str(job.algorithm.get("credit", ""))
    named = {"algorithm": name if ":" in name else None, "credit": credit if ":" in credit else None}
    for role, reference in {"agent": agent.function, "grader": agent.grader, **named}.items():
        if reference is not None:
            found |= {role: reference, **_digests(role, folder, _of_reference(folder, reference))}
    if agent.command and not agent.function:
        found |= {"agent": digest_of(agent.command), **_digests("agent", folder, _of_command(folder, agent.command))}
    return found


def _digests(role: str, folder: Path, files: Iterable[Path]) -> dict[str, str]:
    shown = {file: file.relative_to(folder) if file.is_relative_to(folder) else file for file in sorted(files)}
    return {f"{role} {name}": file_digest(file) for file, name in shown.items()}


def _of_reference(folder: Path, reference: str) -> set[Path]:
    """Return the files of `file.py:name` or `package.module:name`."""
    where = reference.rpartition(":")[0]
    return _of_file(folder, Path(where).expanduser()) if where.endswith(".py") or "/" in where else _of_module(folder, where)


def _of_command(folder: Path, command: list[str]) -> set[Path]:
    """Return the files that a command names, with their imports; a program outside of the job's folder (an interpreter) is none of them."""
    found: set[Path] = set()
    for before, word in itertools.pairwise(["", *command]):
        if before == "-m":
            found |= _of_module(folder, word) | _of_module(folder, f"{word}.__main__")
        elif before or (folder / word).resolve().is_relative_to(folder):
            found |= _of_file(folder, Path(word))
    return found


def _of_file(folder: Path, path: Path) -> set[Path]:
    file = (folder / path).resolve()
    if not file.is_file():
        return set()
    finder = ModuleFinder([str(file.parent), str(folder)])
    return {file, *(_found(finder, file, lambda: finder.run_script(str(file))) if file.suffix == ".py" else ())}


def _of_module(folder: Path, name: str) -> set[Path]:
    """Return a module's file, and in the job's folder also its packages and imports. No package is imported for this."""
    path: list[str] | None = [str(folder), *sys.path]
    spec: ModuleSpec | None = None
    for end in range(1, name.count(".") + 2):
        spec = PathFinder.find_spec(".".join(name.split(".")[:end]), path) if path is not None else None
        path = list(spec.submodule_search_locations or ()) if spec is not None else None
    if spec is None or not spec.has_location or spec.origin is None:
        return set()
    file, finder = Path(spec.origin).resolve(), ModuleFinder([str(folder)])
    return {file, *(_found(finder, file, lambda: finder.import_hook(name)) if file.is_relative_to(folder) else ())}


def _found(finder: ModuleFinder, file: Path, run: Callable[[], object]) -> list[Path]:
    """Return the files of the modules that `run` finds; a warning says if a file cannot be parsed."""
    try:
        with warnings.catch_warnings(action="ignore"):
            run()
    except (SyntaxError, ImportError) as error:
        _log.warning("what %s imports is not known: %s", file, error)
    files: Iterable[str | None] = (getattr(module, "__file__", None) for module in finder.modules.values())
    return [Path(file).resolve() for file in files if file is not None]
