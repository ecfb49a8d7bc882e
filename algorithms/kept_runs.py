"""Give a run folder to the run of any algorithm, including those that do not open one themselves."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from agl_otel.algorithms import Algorithm, FunctionalAlgorithm
from agl_otel.algorithms.run_folder import RunFolder, digest_of
from agl_otel.algorithms.utils import items
from agl_otel.types import Dataset, NamedResources

RUN_DIR: Final = "run_dir"
"""The argument and attribute of an algorithm that opens its own run folder."""


@contextmanager
def run_folder_for(
    algorithm: Algorithm,
    folder: str | Path | None,
    *,
    train: Dataset[Any] | None,
    val: Dataset[Any] | None,
    resources: NamedResources | None = None,
    options: Any = None,
) -> Generator[None]:
    """Open `folder` as the algorithm's run folder during the block. None: the run has none, unless the algorithm opens its own.

    An algorithm with a `run_dir` attribute gets the folder there, unless it has one already. Any other gets an open RunFolder
    (`Algorithm.get_run_folder`) with run.json, a lock, metrics.jsonl, and the same id and seed when it is started again; which work it
    then skips is up to the algorithm. Raises what RunFolder raises.
    """
    own: Any = algorithm
    if folder is None or hasattr(algorithm, RUN_DIR):
        if folder is not None and own.run_dir is None:
            own.run_dir = Path(folder)
        yield
        return
    fingerprint = {
        "train": digest_of(items(train)),
        "val": digest_of(items(val)),
        "resources": {name: resource.model_dump() for name, resource in (resources or {}).items()},
        "options": options or {},
    }
    with closing(RunFolder(Path(folder).absolute(), algorithm=name_of(algorithm), options=fingerprint)) as run:
        algorithm.set_run_folder(run)
        try:
            yield
        finally:
            algorithm.set_run_folder(None)


def name_of(algorithm: Algorithm) -> str:
    """Return the name of the algorithm's function or class."""
    return algorithm.name if isinstance(algorithm, FunctionalAlgorithm) else type(algorithm).__name__
