"""[algorithm] of a job file: its model, made from the keyword arguments of the algorithm's class, and the type of a job's checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, create_model

from agl_otel.algorithms.metric_sinks import check_metrics
from agl_otel.algorithms.options import STRICT, arguments_of
from agl_otel.errors import UnavailableError, UsageError

Need = Callable[[], object]
"""A check of something that a job needs; raises UsageError if it is missing, and starts nothing. It may return memory.Findings."""


@contextmanager
def of_table(table: str) -> Generator[None]:
    """Write the table of a job file before the block's UsageError or UnavailableError, which names a key of it."""
    try:
        yield
    except (UsageError, UnavailableError) as error:
        raise (error if str(error).startswith("[") else type(error)(f"[{table}] {error}")) from None


def check_sinks(metrics: Any) -> None:
    """Raise UsageError for a metric sink that is unknown, SettingsError for one whose package is missing."""
    with of_table("algorithm"):
        check_metrics(metrics)


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options without these."""
    return {name: value for name, value in options.items() if name not in names}


def options_of(name: str, *kinds: type, hidden: Collection[str] = ()) -> type[BaseModel]:
    """Make the model of options of the algorithm `name`: its name, and the arguments of the classes' `__init__` except `hidden` ones."""
    options: dict[str, Any] = {"name": (Literal[name], name)}
    for kind in kinds:
        options |= arguments_of(kind.__init__, hidden=hidden)
    return create_model("AlgorithmOptions", __config__=STRICT, **options)
