"""Where runs of any algorithm are kept: the one place that gives a folder to those that do not keep their runs themselves."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms import Algorithm, FunctionalAlgorithm
from agl_otel.algorithms.run_folder import RunFolder, digest_of
from agl_otel.algorithms.utils import items
from agl_otel.types import Dataset, NamedResources

OWN_FOLDER: Final = "run_dir"
"""The argument, and attribute, of an algorithm that keeps its runs itself."""


@contextmanager
def keeping(
    algorithm: Algorithm,
    folder: str | Path | None,
    *,
    train: Dataset[Any] | None,
    val: Dataset[Any] | None,
    resources: NamedResources | None = None,
    options: Any = None,
) -> Generator[None]:
    """Have the run of an algorithm kept in `folder` for the while that it works. None: it is not kept, unless it keeps itself.

    An algorithm with a `run_dir` keeps its runs there, or where that says already. Any other gets an open RunFolder
    (`Algorithm.get_run_folder`): a run.json with what it works on, a lock, lines for metrics.jsonl, and the same id and seed when it is
    started again. What it does not do again then is its own business. Raises what RunFolder raises.
    """
    given: Any = algorithm
    if folder is None or hasattr(algorithm, OWN_FOLDER):
        if folder is not None and given.run_dir is None:
            given.run_dir = Path(folder)
        yield
        return
    course = {
        "train": digest_of(items(train)),
        "val": digest_of(items(val)),
        "resources": {name: resource.model_dump() for name, resource in (resources or {}).items()},
        "options": options or {},
    }
    with closing(RunFolder(Path(folder).absolute(), algorithm=name_of(algorithm), options=course)) as run:
        algorithm.set_run_folder(run)
        try:
            yield
        finally:
            algorithm.set_run_folder(None)


def name_of(algorithm: Algorithm) -> str:
    """Of its function, or of its class."""
    return algorithm.name if isinstance(algorithm, FunctionalAlgorithm) else type(algorithm).__name__
