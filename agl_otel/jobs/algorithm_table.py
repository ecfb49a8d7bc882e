"""[algorithm] of a job file: its model, made from the keyword arguments of the algorithm's class, and the type of a job's checks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pydantic import BaseModel, create_model

from agl_otel.algorithms.metric_sinks import check_metrics
from agl_otel.algorithms.options import STRICT, arguments_of
from agl_otel.errors import SettingsError, UnavailableError, UsageError
from agl_otel.jobs.job import Job

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


def check_timeouts(job: Job, step_seconds: float | None) -> None:
    """Raise SettingsError where an attempt may take longer than its step, which lasts `step_seconds` at the most."""
    seconds = job.agent.timeout_seconds
    if step_seconds is not None and seconds > step_seconds and job.options.get("groups_in_flight") is None:
        raise SettingsError(
            f"[agent] timeout_seconds = {seconds:g}: it must be at most step_timeout_seconds ({step_seconds:g}), because a step "
            "cancels the attempts that still run, so that only the fast ones are trained on; give a smaller one, or a greater "
            "step_timeout_seconds of [algorithm]"
        )


def steps_warnings(options: Mapping[str, Any], *, max_steps: int, score_window: int = 1) -> list[str]:
    """Return a warning for each option that counts more steps than the run does; `max_steps` and `score_window` are the defaults."""
    steps, window = options.get("max_steps", max_steps), options.get("score_window", score_window)
    found: list[str] = []
    if (every := options.get("val_every") or 0) > steps:
        found.append(
            f"val_every = {every} is more than max_steps ({steps}): the run validates only before its first step and after its last"
        )
    if window > steps and options.get("target_score") is not None:
        found.append(
            f"score_window = {window} is more than max_steps ({steps}): target_score is of a mean of so many steps, and cannot end the run"
        )
    elif "score_window" in options and options.get("target_score") is None:
        found.append(f"score_window = {window} has no effect without target_score")
    return found


def without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the options without these."""
    return {name: value for name, value in options.items() if name not in names}


def options_of(name: str, *kinds: type, hidden: Collection[str] = ()) -> type[BaseModel]:
    """Make the model of options of the algorithm `name`: its name, and the arguments of the classes' `__init__` except `hidden` ones."""
    options: dict[str, Any] = {"name": (Literal[name], name)}
    for kind in kinds:
        options |= arguments_of(kind.__init__, hidden=hidden)
    return create_model("AlgorithmOptions", __config__=STRICT, **options)
